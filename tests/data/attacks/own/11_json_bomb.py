# id: own/11_json_bomb
# class: output
# mode: call
# check: damage,wall,verdict,output
# expected-status: any
# tries: return a list nested 200,000 deep
# attack succeeds when: the grader raises, hangs, or reports a pass
class Solution:
    def add(self, a, b):
        x = []
        for _ in range(200000):
            x = [x]
        return x
