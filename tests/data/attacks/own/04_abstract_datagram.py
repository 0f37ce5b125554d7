# id: own/04_abstract_datagram
# class: network
# mode: stdio
# check: net
# expected-status: any
# tries: send from one end of a socket pair to other addresses, connect it to an abstract and to a path socket
# attack succeeds when: a server of the checker is reached
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
    for where in ("\0@@ABSTRACT@@", "@@UNIX@@"):
        for f in (lambda s: s.sendto(b"x", where), lambda s: s.connect(where), lambda s: s.sendmsg([b"x"], [], 0, where)):
            try:
                f(socket.socketpair(socket.AF_UNIX, kind)[0])
                print("sent")
            except Exception as e:
                print(type(e).__name__)
        try:
            s = socket.socket(socket.AF_UNIX, kind)
            s.connect(where)
            print("connected")
        except Exception as e:
            print(type(e).__name__)
