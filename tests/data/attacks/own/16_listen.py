# id: own/16_listen
# class: network
# mode: stdio
# check: listen
# expected-status: any
# tries: listen on a port of the machine
# attack succeeds when: the checker can connect to it
import socket, time
try:
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("0.0.0.0", @@LISTEN_PORT@@))
    s.listen()
    time.sleep(2)
except Exception as e:
    print(type(e).__name__)
