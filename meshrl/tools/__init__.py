"""Commands around a run: `meshrl plan`, `meshrl doctor`, `meshrl verify` and `meshrl migrate`.

`plan` predicts memory and time. `doctor` checks the machine. `verify` checks a layout's numerics. `migrate` translates
scripts and configs of verl.
"""
