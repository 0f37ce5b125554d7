"""The command line: parses options, calls the rooms below, prints what they return.

`app` is the program, `index` lists the commands; each command is one file in `commands`. No room imports this one.
"""
