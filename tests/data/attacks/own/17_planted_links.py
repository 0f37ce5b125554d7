# id: own/17_planted_links
# class: host-write
# mode: stdio
# check: changed,residue
# expected-status: any
# tries: plant symbolic and hard links to the results, so that a clean-up or a copy follows them
# attack succeeds when: a file changed or was left
import os
for f in (lambda: os.symlink("@@VICTIM@@", "link"), lambda: os.symlink("@@VICTIM@@/rows.parquet", "/var/tmp/evil-@@TOKEN@@"), lambda: os.link("@@VICTIM@@/rows.parquet", "hard"), lambda: os.symlink("/", "/dev/shm/evil-@@TOKEN@@")):
    try:
        f()
        print("made")
    except Exception as e:
        print(type(e).__name__)
