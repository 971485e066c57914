"""Settings of the executor: flags win over environment (PAGEDKV_EXECUTOR_*), environment over the YAML file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from gpu_executor.memory import Budget

ENV_PREFIX = "PAGEDKV_EXECUTOR_"

_SHORT = {"f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f64": "float64"}


class SettingsInvalid(Exception):
    """What is wrong with the settings, in one line."""


def _address(text: str) -> str:
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):\d{1,5}", text) or int(text.rpartition(":")[2]) > 65535:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return text


def _budget(value: object) -> object:
    return Budget.parse(str(value)) if isinstance(value, str | int | float) else value


BudgetSetting = Annotated[Budget, BeforeValidator(_budget)]


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: Path
    service: str = "127.0.0.1:50061"
    listen: str = "127.0.0.1:50062"  # empty: ReadKv and health are not served
    token_file: Path | None = None  # the token that this executor shows the service
    listen_token_file: Path | None = None  # the token that callers of ReadKv must show
    tls: bool = False  # dial with TLS; also meant by the three files
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    trust_network: bool = False  # send the token without TLS too
    device: str | None = None  # None: cuda when there is one, else cpu
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None  # None: bfloat16 on cuda, else float32
    block_size: int = Field(16, ge=1, le=1024)
    blocks: int | None = Field(None, ge=2, le=2**31 - 1)
    memory: BudgetSetting | None = None
    host_blocks: int | None = Field(None, ge=0, le=2**31 - 1)
    host_memory: BudgetSetting | None = None
    max_rows: int = Field(256, ge=1, le=65_536)
    max_batch_tokens: int = Field(2048, ge=1, le=1 << 20)
    model_cache: Path = Path("~/.cache/pagedkv/models")
    log_format: Literal["console", "json"] = "console"

    @field_validator("dtype", mode="before")
    @classmethod
    def _full_name(cls, value: object) -> object:
        return _SHORT.get(value, value) if isinstance(value, str) else value

    @field_validator("service")
    @classmethod
    def _service_address(cls, value: str) -> str:
        return _address(value)

    @field_validator("listen")
    @classmethod
    def _listen_address(cls, value: str) -> str:
        return _address(value) if value else value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
            raise ValueError(f"{value!r} is none of cpu, cuda, cuda:N")
        return value

    @field_validator("model", "model_cache", "token_file", "listen_token_file", "tls_ca", "tls_cert", "tls_key")
    @classmethod
    def _expand_home(cls, value: Path | None) -> Path | None:
        return value and value.expanduser()

    @model_validator(mode="after")
    def _one_size_each(self) -> Settings:
        for blocks, memory in (("blocks", "memory"), ("host_blocks", "host_memory")):
            if getattr(self, blocks) is not None and getattr(self, memory) is not None:
                raise ValueError(f"{blocks} and {memory} both say how large a pool is: give one of them")
        return self


def load_settings(flags: dict[str, Any], config: Path | None = None) -> Settings:
    """Merges flags (those that were given), environment and the YAML file.

    config: the file; None: what PAGEDKV_EXECUTOR_CONFIG names, if anything.
    Raises SettingsInvalid.
    """
    if config is None and (named := os.environ.get(ENV_PREFIX + "CONFIG")):
        config = Path(named)
    if config is not None and not config.is_file():
        raise SettingsInvalid(f"config: there is no file {config}")

    class _Merged(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            if config is None:
                return init_settings, env_settings
            return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=config)

    try:
        return _Merged(**flags)
    except ValidationError as error:
        raise SettingsInvalid("; ".join(_line(entry) for entry in error.errors())) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise SettingsInvalid(f"{config} is no YAML map of settings: {' '.join(str(error).split())}") from None


def _line(entry: Any) -> str:
    name = ".".join(str(part) for part in entry["loc"]).replace("_", "-")
    if entry["type"] == "missing":
        variable = ENV_PREFIX + name.upper().replace("-", "_")
        return f"{name} is missing: give --{name}, {variable} or a line of the config file"
    if entry["type"] == "extra_forbidden":
        return f"there is no setting {name}"
    message = entry["msg"].removeprefix("Value error, ")
    return f"{name}: {message}, got {entry['input']!r}" if name and "got" not in message else message
