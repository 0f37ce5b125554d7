# id: own/25_installed_packages
# class: host-read
# mode: stdio
# check: leak,marker
# expected-status: any
# tries: import what is installed beside the interpreter, and the harness itself
# attack succeeds when: kvbench or a package can be read
import glob, os, sys
lib = os.path.dirname(os.__file__)
for place in (lib + "/site-packages", lib + "/dist-packages", "/usr/lib/python3/dist-packages", "/usr/local/lib"):
    sys.path.insert(0, place)
    for path in glob.glob(place + "/*/__init__.py")[:50] + glob.glob(place + "/*/METADATA")[:50]:
        try:
            open(path).read()
            if lib in path:
                print("REACHED-@@TOKEN@@", path)
        except Exception:
            pass
for name in ("kvbench", "pip", "kvbench_private_marker", "torch"):
    try:
        __import__(name)
        print("REACHED-@@TOKEN@@", name)
    except ImportError as e:
        print(type(e).__name__)
