"""The device pool, the host pool, and the ops that move blocks in and between them."""

from gpu_executor.pool.device_pool import DevicePool, HostPool
from gpu_executor.pool.ops import apply_ops, check_ops
from gpu_executor.pool.storage import DTYPES

__all__ = ["DTYPES", "DevicePool", "HostPool", "apply_ops", "check_ops"]
