"""Runs a program and then the checks on it in one interpreter, which is given the text of this file.

The checks, and the word to say after the last of them, are asked for when the program has run: until then no file or
memory that it can reach holds them.
"""

import os
import sys


def main(channel: int) -> None:
    """`channel` is a socket: whoever asks by a byte gets the word in a line and then the checks."""
    run, build, say, ask, read = exec, compile, print, os.write, os.read  # the program may give these names to others
    # As if Python had been started with the file: what it defines is in `__main__`, for pickle and dataclasses as well.
    names = vars(sys.modules["__main__"])
    names["__file__"] = sys.argv[0] = "main.py"
    names["__doc__"] = None
    del sys.argv[1:], names["main"], names["os"], names["sys"]
    with open("main.py", "rb") as file:
        program = file.read()
    run(build(program, "main.py", "exec"), names)
    ask(channel, b"?")
    told = b""
    while piece := read(channel, 65536):
        told += piece
    word, _, checks = told.partition(b"\n")
    run(build(checks, "checks.py", "exec"), names)
    say("\n" + word.decode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
