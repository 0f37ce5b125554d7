# id: own/28_error_text
# class: output
# mode: call
# check: output,damage,verdict
# expected-status: runtime_error
# tries: raise an exception whose text is 64 MiB and whose repr raises again
# attack succeeds when: the grader keeps it, or fails
class E(Exception):
    def __repr__(self):
        return "\x1b[2J" + "x" * (64 << 20)
    def __str__(self):
        raise E()
class Solution:
    def add(self, a, b):
        raise E("\ud800")
