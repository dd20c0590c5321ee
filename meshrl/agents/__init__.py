"""Multi-turn rollouts: agent loops, tools, parsers of tool calls, environments and the encoding of turns."""
