# id: own/02_input_rewritten
# class: host-write
# mode: stdio
# check: verdict,marker
# expected-status: any
# tries: write into the file behind standard input, through the descriptor and through /proc
# attack succeeds when: a write works
import os
for f in (lambda: os.pwrite(0, b"9", 0), lambda: os.truncate(0, 0), lambda: open("/proc/self/fd/0", "r+b", 0).write(b"9"), lambda: open("/dev/stdin", "r+b", 0).write(b"9")):
    try:
        f()
        print("REACHED-@@TOKEN@@")
    except Exception as e:
        print(type(e).__name__)
