# id: own/09_metadata
# class: host-write
# mode: stdio
# check: changed
# expected-status: any
# tries: change modes, owners, times and attributes of the results, which no file access is needed for
# attack succeeds when: a file below VICTIM or HOME changed
import os
for p in ("@@VICTIM@@/rows.parquet", "@@VICTIM@@", "@@HOME@@/.netrc"):
    for f in (lambda: os.chmod(p, 0), lambda: os.utime(p, (1, 1)), lambda: os.chown(p, 12345, 12345), lambda: os.setxattr(p, "user.evil", b"1"), lambda: os.truncate(p, 0), lambda: os.rename(p, p + "x"), lambda: os.link(p, p + "y"), lambda: os.open(p, os.O_RDONLY | os.O_TRUNC)):
        try:
            f()
            print("done")
        except Exception as e:
            print(type(e).__name__)
