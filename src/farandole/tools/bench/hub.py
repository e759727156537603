"""The hub of a job on hosts in namespaces, without a launcher, inside the first host.
Touches rendezvous/; prints its address, and ends when its standard input does. python -m ... FD SIZE ADDRESS"""

from __future__ import annotations

import sys

from ...base.version import package_version
from ...rendezvous.hub import Hub
from ...rendezvous.secret import Secret


def main() -> None:
    """One job."""
    descriptor, size, address = sys.argv[1:]
    hub = Hub(Secret.read(int(descriptor)), int(size), address, package_version())
    hub.start()
    print(hub.address, flush=True)
    sys.stdin.read()
    hub.close()


if __name__ == "__main__":
    main()
