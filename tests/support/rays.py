"""A Ray for tests, in processes of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

HEAD = """
import sys
import ray
options = dict(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, logging_level="ERROR")
ray.init("local", _temp_dir=sys.argv[1], log_to_driver=False, **options)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a Ray of two CPUs and no GPU. It ends with the block, or with this process.

    Sets environment variables for this process too: Ray asks for its token.
    """
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    folder = tempfile.mkdtemp(prefix="kv", dir="/tmp")  # Ray's sockets allow 107 characters
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert head.stdout is not None
    try:
        yield head.stdout.readline().strip()
    finally:
        head.communicate()
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            del os.environ[name]
