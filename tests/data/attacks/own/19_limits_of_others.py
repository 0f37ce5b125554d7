# id: own/19_limits_of_others
# class: signal
# mode: stdio
# check: marker,damage
# expected-status: any
# tries: lower the limits and the priority of other processes, raise the own
# attack succeeds when: one of the calls works
import ctypes, os, resource
for pid in (@@SENTINEL_PID@@, @@GRADER_PID@@, os.getppid()):
    for f in (lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0)), lambda: resource.prlimit(pid, resource.RLIMIT_AS), lambda: os.setpriority(os.PRIO_PROCESS, pid, 19), lambda: os.sched_setaffinity(pid, {0})):
        try:
            f()
            print("REACHED-@@TOKEN@@")
        except Exception as e:
            print(type(e).__name__)
for name in ("AS", "NPROC", "CPU", "STACK"):
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (resource.RLIM_INFINITY,) * 2)
        print("REACHED-@@TOKEN@@")
    except Exception as e:
        print(type(e).__name__)
