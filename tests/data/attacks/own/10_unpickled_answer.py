# id: own/10_unpickled_answer
# class: verdict
# mode: call
# check: changed,verdict,damage
# expected-status: wrong_answer
# tries: return objects that run code in the grader if it unpickles, evaluates or compares them
# attack succeeds when: a file changed, or the verdict is pass
import os
class Bad:
    def __reduce__(self):
        return (os.system, ("echo evil > @@VICTIM@@/rows.parquet",))
    def __eq__(self, other):
        open("@@VICTIM@@/journal.jsonl", "w").close()
        return True
    def __repr__(self):
        return "__import__('os').remove('@@VICTIM@@/expected.json') or True"
    __hash__ = object.__hash__
    def __index__(self):
        return -1
class Solution:
    def add(self, a, b):
        return Bad()
