# horovod.runner.elastic.worker: how a rank gets news about hosts that join or leave.
# Only re-exports names: ranks get the news from the elastic driver.
"""Names that other programs import. `notification_manager` notifies elastic states."""

from __future__ import annotations

from farandole.elastic.loop import WorkerNotificationManager, notification_manager
from farandole.elastic.state import HostUpdateResult

HOROVOD_GLOO_RENDEZVOUS_ADDR = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
HOROVOD_GLOO_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
HOROVOD_GLOO_IFACE = "HOROVOD_GLOO_IFACE"
HOROVOD_HOSTNAME = "HOROVOD_HOSTNAME"
HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"

__all__ = ["HostUpdateResult", "WorkerNotificationManager", "notification_manager"]
