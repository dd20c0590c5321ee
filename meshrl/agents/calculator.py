"""A calculator tool (arithmetic on numbers, with bounded cost), and the reward of its recipe."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from meshrl.agents.tools import tool

LONGEST, LARGEST_POWER = 200, 64
Number = int | float
BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@tool(timeout=5.0)
async def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, such as 12*(3+4)
    """
    return str(evaluate(expression))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float]:
    """Score 1 if the text after the last tool call is the product. `tool_use` is 1 if the model called the tool.

    A call itself earns nothing. Tool use increases only because it makes answers correct.
    """
    _, _, answer = solution_str.rpartition("</tool_call>")
    right = float(answer.strip() == str(ground_truth))
    return {"score": right, "acc": right, "tool_use": float("<tool_call>" in solution_str)}


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression; raise ValueError for anything else."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, more than {LONGEST}")
    try:
        parsed = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"'{expression}' is no arithmetic expression") from error
    value = _value(parsed.body)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        assert isinstance(node.value, int | float)
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > LARGEST_POWER or abs(left) > 10**LARGEST_POWER):
            raise ValueError(f"powers go up to {LARGEST_POWER}")
        value = BINARY[type(node.op)](left, right)
        if isinstance(value, complex):
            raise ValueError("the result is not a real number")
        return value
    raise ValueError("only numbers with + - * / // % ** and parentheses can be computed")
