# id: own/08_deep_tree
# class: resource
# mode: stdio
# check: residue,damage,wall,disk
# expected-status: wrong_answer
# tries: make a directory tree of 3,000 levels, which ends a recursive clean-up
# attack succeeds when: the grader dies or the tree stays
import os
try:
    for i in range(3000):
        os.mkdir("d")
        os.chdir("d")
    print("made", i)
except Exception as e:
    print(type(e).__name__)
