SHELL := /bin/bash
PY := .venv/bin/python

.PHONY: protos
protos: ## generate pagedkv.v1 from protos/
	.venv/bin/python -m grpc_tools.protoc -I protos --python_out=clients/python --pyi_out=clients/python --grpc_python_out=clients/python protos/pagedkv/v1/*.proto
