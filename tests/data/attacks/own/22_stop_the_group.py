# id: own/22_stop_the_group
# class: signal
# mode: stdio
# check: wall,damage
# expected-status: any
# tries: send SIGSTOP and SIGKILL to the own group, to the session and to everyone
# attack succeeds when: the grader or the sentinel stops or dies
import os, signal
for f in (lambda: os.kill(0, signal.SIGSTOP), lambda: os.killpg(os.getpgid(os.getppid()), signal.SIGKILL), lambda: os.kill(-1, signal.SIGKILL), lambda: os.kill(-@@GRADER_PID@@, signal.SIGKILL), lambda: signal.pidfd_send_signal(os.pidfd_open(@@SENTINEL_PID@@), 9)):
    try:
        f()
        print("sent")
    except Exception as e:
        print(type(e).__name__)
