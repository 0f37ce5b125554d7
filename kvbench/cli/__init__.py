"""The command line: parses options, calls the other packages, prints their results.

`app` is the program, `index` lists the commands; each command is one file in `commands`. No package imports `cli`.
"""
