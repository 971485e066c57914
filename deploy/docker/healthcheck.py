"""Ends with 0 when grpc.health.v1 at an address calls a service SERVING, else says what it is and ends with 1.

python healthcheck.py 127.0.0.1:50061 pagedkv.v1.ExecutorLinkService
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

address, service = sys.argv[1:]
with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
    try:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=4)
    except grpc.RpcError as error:
        sys.exit(f"{address}: {error.code().name}: {error.details()}")
if reply.status != health_pb2.HealthCheckResponse.SERVING:
    sys.exit(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}")
