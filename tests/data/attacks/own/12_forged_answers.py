# id: own/12_forged_answers
# class: verdict
# mode: call
# check: verdict,damage,wall
# expected-status: any
# tries: write answers of one's own to the channel: deep lists, huge numbers, NaN, broken text, several at once
# attack succeeds when: the verdict is pass or the grader fails
import os, struct
def send(body):
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack(">I", len(body)) + body)
        except OSError:
            pass
class Solution:
    def add(self, a, b):
        for body in (b"O" + b"[" * 60000, b"O" + b"9" * 60000, b"ONaN", b"O\xff\xfe", b"", b"Otrue", b"O1e999", b"Q", b"R"):
            send(body)
        return -1
