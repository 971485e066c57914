"""Settings of the service: flags above environment (PAGEDKV_*) above a YAML file above defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from block_manager_svc.core.eviction import EvictionName
from block_manager_svc.logs import LogFormat, LogLevel

ENV_PREFIX = "PAGEDKV_"


class BadSettings(Exception):
    """One line for each setting that is wrong."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("must be host:port, such as 127.0.0.1:50061 or [::1]:50061; port 0 takes a free one")
    return value


class Settings(BaseSettings):
    """What `block-manager --help` lists. Immutable."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    listen: Annotated[str, AfterValidator(_address)] = Field(
        "127.0.0.1:50061", description="host:port to listen on; loopback unless told otherwise"
    )
    tokens_file: Path | None = Field(
        None, description="file of token hashes, their tenants and roles; without one everybody may do everything"
    )
    tls_cert: Path | None = Field(None, description="PEM file of the certificate to serve TLS with")
    tls_key: Path | None = Field(None, description="PEM file of its key")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of authorities; callers must show a certificate that one of them signed"
    )
    token_budget: int = Field(2048, ge=1, description="tokens computed in one step at most")
    max_running: int = Field(256, ge=1, description="samples computed at once at most")
    max_queue: int = Field(1024, ge=1, description="calls that may wait; more are refused with QUEUE_FULL")
    eviction: EvictionName = Field("lru", description="which cached block goes first: lru, lfu, s3fifo or priority")
    watermark: float = Field(
        0.01, ge=0, lt=1, allow_inf_nan=False, description="part of the pool that admissions leave to who is there"
    )
    zero_between_tenants: bool = Field(
        True, description="zero a block that another tenant has written before it is given out"
    )
    folding: bool = Field(
        False, description="let a block that was computed twice give way to the first; its last bits may differ"
    )
    executor_grace: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="seconds that calls wait for a lost executor to come back"
    )
    heartbeat_interval: float = Field(
        1.0, ge=0.001, le=3600, description="seconds of silence after which a heartbeat is sent to the executor"
    )
    silence_limit: float = Field(
        10.0, ge=0.002, le=86400, description="seconds of silence after which the executor counts as lost"
    )
    write_timeout: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="seconds that a reader may leave a message unread"
    )
    drain_grace: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="seconds that running calls get to finish after SIGTERM"
    )
    log_level: LogLevel = Field("info", description="debug, info, warning or error")
    log_format: LogFormat = Field("console", description="console, for people, or json, for machines")


def load(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """The settings of this process; `flags` holds those that were given. Raises BadSettings."""
    file = {} if config is None else _read(config)

    class WithFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=file)

    try:
        settings = WithFile(**flags)
    except ValidationError as error:
        raise BadSettings([_line(problem, flags, config) for problem in error.errors()]) from error
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise BadSettings(["tls_cert and tls_key belong together: give both, or none"])
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise BadSettings(["tls_client_ca is for a service with TLS: give tls_cert and tls_key too"])
    if settings.silence_limit < 2 * settings.heartbeat_interval:
        raise BadSettings(
            [
                f"silence_limit is {settings.silence_limit} s, it must be at least twice the heartbeat_interval, "
                f"which is {settings.heartbeat_interval} s"
            ]
        )
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSettings([f"{path}: {error.strerror}"]) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadSettings([f"{path}: not YAML: {' '.join(str(error).split())}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise BadSettings([f"{path}: must be a map from settings to values"])
    if unknown := [key for key in content if key not in Settings.model_fields]:
        known = ", ".join(Settings.model_fields)
        raise BadSettings([f"{path}: unknown setting {key!r}; known are {known}" for key in unknown])
    return content


def _line(problem: ErrorDetails, flags: Mapping[str, Any], config: Path | None) -> str:
    """One line: where the bad value came from, what it is, what is wrong with it."""
    name = str(problem["loc"][0]) if problem["loc"] else ""
    variable = f"{ENV_PREFIX}{name.upper()}"
    if name in flags:
        origin = f"--{name.replace('_', '-')}"
    elif any(variable == key.upper() for key in os.environ):
        origin = variable
    else:
        origin = f"{config}: {name}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{origin}: {message[0].lower()}{message[1:]}, not {problem['input']!r}"
