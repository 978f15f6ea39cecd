"""Flags and exit codes of all commands.

Each flag is defined once, with its name, environment variable, bounds and help text; commands use it as a parameter's
annotation. `--redis` accepts URLs that name a password file, so that the password is neither on the command line nor in
the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import typer
from typer.core import TyperGroup

from chatcache.config import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, PAGE_SIZES, parse_size
from chatcache.errors import InvalidRequestError

EXIT_OK = 0  # also after a drain
EXIT_ERROR = 1
# 2 is Typer's exit code for wrong usage.
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: the model folder or a setting is wrong, so a restart cannot help
EXIT_KILLED = 130

MiB = 2**20
_MAX_PASSWORD_CHARS = 4096

# Former names of options and commands: using one is an error that names the current one.
RENAMED_OPTIONS = {
    "attention": "attention-backend",
    "detach-ttl": "disconnect-grace-period",
    "max-num-waiting": "max-queued-requests",
    "max-waiting-tokens": "max-queued-tokens",
    "preemption": "preemption-mode",
    "public-prompt": "shared-system-prompt",
    "swap-memory": "swap-space",
}
RENAMED_COMMANDS = {"redis-user": "redis-acl", "claim": "assign-owner"}


class CommandGroup(TyperGroup):
    """Command group whose errors for former names of commands and options give the present name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in RENAMED_COMMANDS:
            ctx.fail(f"The command {args[0]!r} is now called {RENAMED_COMMANDS[args[0]]!r}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _describe_bad_value(error)
            raise
        except Exception as error:  # NoSuchOption: Typer exports no public name for it
            name = str(getattr(error, "option_name", "")).removeprefix("--")
            if name == "config":
                ctx.fail("--config belongs in front of the command: chatcache --config FILE COMMAND.")
            if name in RENAMED_OPTIONS:
                ctx.fail(f"The option --{name} is now called --{RENAMED_OPTIONS[name]}.")
            raise


def _describe_bad_value(error: Any) -> str:
    """Return the message of a BadParameter, with the environment variable or file that contains the value."""
    message = str(error.message).removeprefix("Value error, ")  # Typer's prefix
    params = () if error.ctx is None else error.ctx.command.params
    for param in params:
        if param is error.param or error.param_hint in param.opts:
            source = _source_of(error.ctx, param.name)
            if source == "the settings file":
                source += f" {error.ctx.find_root().params['config']}"
            if source and source != "a flag":
                return f"{message.removesuffix('.')} (given by {source})."
    return message


def env(name: str) -> str:
    """Return the environment variable of a flag."""
    return "CHATCACHE_" + name.upper().replace("-", "_")


def _flag(name: str, help: str, *, number: type[int] | type[float] = int, **more: Any) -> Any:
    """Return an option with an environment variable; `number` is the type of a range option."""
    make = typer.Option if "min" not in more else integer_option if number is int else float_option
    return make(f"--{name}", envvar=env(name), show_envvar=False, help=help, **more)


def integer_option(*names: str, min: int, max: int | None = None, **more: Any) -> Any:
    """Return a `typer.Option` for integers with readable range errors and the metavar N."""
    return typer.Option(*names, min=min, max=max, parser=_number(int, min, max), metavar="N", **more)


def float_option(*names: str, min: float, max: float, **more: Any) -> Any:
    """Return a `typer.Option` for numbers with readable range errors and the metavar X."""
    return typer.Option(*names, min=min, max=max, parser=_number(float, min, max), metavar="X", **more)


def _number(kind: type[int] | type[float], low: float, high: float | None) -> Callable[[Any], int | float]:
    bounds = f"of {low} or more" if high is None else f"from {low} to {high}"

    def read(value: Any) -> int | float:
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            whole = "a whole number" if kind is int else "a number"
            raise typer.BadParameter(f"{str(value)!r} is not {whole} {bounds}.") from None
        if math.isnan(number):
            raise typer.BadParameter(f"{value} is not a number {bounds}.")
        if number < low:
            raise typer.BadParameter(f"must be at least {low}, got {value}.")
        if high is not None and number > high:
            raise typer.BadParameter(f"must be at most {high}, got {value}.")
        return number

    return read


def _kv_memory(text: str) -> int:
    try:
        return parse_size(text, low=MiB, high=2**44)
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message) from None


def _swap_space(text: str) -> int:
    try:
        return parse_size(text, high=2**44)
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message) from None


def _db(text: Any) -> str:
    if not text:  # SQLite would keep everything in a temporary file
        raise typer.BadParameter("must name a file.")
    return str(text)


def _db_file(text: Any) -> str:
    if text == ":memory:":  # of servers: it would be lost at the end of a command
        raise typer.BadParameter("must name a file.")
    return _db(text)


def _redis_url(text: str) -> str:
    try:
        url = _insert_password(text)
        if url:
            from chatcache.redis_urls import check_url  # imports redis-py, which most commands do not need

            check_url(url)
        return url
    except OSError as error:
        raise typer.BadParameter(f"password_file {error.filename}: {error.strerror}.") from None
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from None


def _insert_password(url: str) -> str:
    """Return the URL with the password read from its `password_file`, if it names one.

    Raises: ValueError, OSError.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    name = query.pop("password_file", None)
    if name is None:
        return url
    if parts.password is not None:
        raise ValueError("the URL has a password and a password_file; give one of them")
    with Path(name).open(encoding="utf-8") as file:
        password = file.read(_MAX_PASSWORD_CHARS).strip()
    if not password:
        raise ValueError(f"the password file {name} is empty")
    user, _, address = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{address}", query=urlencode(query)))


def refuse_two_stores(context: typer.Context) -> None:
    """Refuse --db together with --redis, since conversations and keys are kept in one store.

    One combination is allowed: a --redis flag or variable overrides a `db` in the settings file, because the Docker
    image has such a settings file.

    Raises: BadParameter.
    """
    if not context.params.get("redis"):
        return
    file, server = (_source_of(context, name) for name in ("db", "redis"))
    if file and (file != "the settings file" or server == file):
        raise typer.BadParameter(
            f"both are given (--db by {file}, --redis by {server}), and conversations are kept in one store; "
            "remove one of them.",
            param_hint="--db / --redis",
        )


def _source_of(context: typer.Context, name: str) -> str:
    """Return for an error message where a parameter's value comes from; "" for the default.

    The source is a flag, an environment variable or the settings file.
    """
    source = context.get_parameter_source(name)
    variable = f"the environment variable {env(name)}"
    named = {"COMMANDLINE": "a flag", "ENVIRONMENT": variable, "DEFAULT_MAP": "the settings file"}
    return named.get(source.name, "") if source is not None else ""


def _page_size(text: str) -> int:
    if str(text) not in {str(size) for size in PAGE_SIZES}:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(str, PAGE_SIZES))}.")
    return int(text)


Model = Annotated[
    str,
    typer.Argument(
        envvar=env("model"),
        show_envvar=False,
        show_default=False,
        help="Model folder or Hugging Face id; default: the demo model.",
    ),
]

Device = Annotated[Literal["auto", "cpu", "cuda"], _flag("device", "Device of the model; auto: a GPU if there is one.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    _flag("dtype", "Data type of weights and KV pages; auto: bfloat16 on GPUs and CPUs with AVX2, else float32."),
]
AttentionBackend = Annotated[
    Literal["auto", "reference", "cpu", "triton"],
    _flag("attention-backend", "Attention kernels; auto: the fastest for the device."),
]
Quantization = Annotated[
    Literal["none", "int8", "fp8"],
    _flag(
        "quantization",
        "8-bit weights, half the bytes of bfloat16; logits differ slightly. int8 on CPUs, fp8 on GPUs (8.9 or newer).",
    ),
]
ChatTemplate = Annotated[
    str,
    _flag(
        "chat-template",
        "File with a Jinja chat template, instead of the model's own.",
        metavar="FILE",
        show_default=False,
    ),
]
Pooling = Annotated[
    Literal["auto", "last", "mean"],
    _flag(
        "pooling",
        "Embeddings: the last token's hidden state, or the mean over all; auto: as the model's folder says, else last.",
    ),
]
KVCacheDtype = Annotated[
    Literal["auto", "fp8"],
    _flag(
        "kv-cache-dtype",
        "fp8: keys and values in 8 bits, so that the memory holds almost twice the tokens; logits differ slightly. On "
        "GPUs (8.9 or newer).",
    ),
]
KVMemory = Annotated[
    int | None,
    _flag(
        "kv-memory",
        "Memory for KV pages, for example 2GiB; default: a share of the free memory.",
        parser=_kv_memory,
        metavar="SIZE",
    ),
]
MaxModelLen = Annotated[
    int | None,
    _flag("max-model-len", "Maximum tokens of prompt and answer together; default: the model's.", min=16, max=2**24),
]
PageSize = Annotated[int, _flag("page-size", "Tokens per KV page: 8, 16, 32 or 64.", parser=_page_size, metavar="INT")]
MaxNumSeqs = Annotated[
    int,
    _flag("max-num-seqs", "Maximum number of candidates and beams that run at the same time.", min=1, max=MAX_NUM_SEQS),
]
MaxNumBatchedTokens = Annotated[
    int,
    _flag("max-num-batched-tokens", "Maximum number of tokens computed per step.", min=16, max=MAX_NUM_BATCHED_TOKENS),
]
MaxPrefillTime = Annotated[
    float | None,
    _flag(
        "max-prefill-time",
        "Seconds per step for prompts while other requests run; 0: no limit; default: 0.05 on CPUs, no limit on GPUs.",
        number=float,
        min=0,
        max=3600,
        show_default=False,
    ),
]
MaxQueuedRequests = Annotated[
    int,
    _flag(
        "max-queued-requests",
        "Maximum number of queued requests; beyond it requests are refused with 503.",
        min=0,
        max=2**20,
    ),
]
MaxQueuedTokens = Annotated[
    int,
    _flag(
        "max-queued-tokens", "Maximum number of queued prompt tokens; beyond it requests are refused.", min=1, max=2**31
    ),
]
SchedulingPolicy = Annotated[
    Literal["fcfs", "priority", "fair"],
    _flag(
        "scheduling-policy",
        "Order of queued requests: fair (least served tenant first, and shares of each step), fcfs, or priority (given "
        "in the request).",
    ),
]
PreemptionMode = Annotated[
    Literal["auto", "swap", "recompute"],
    _flag(
        "preemption-mode",
        "How preempted requests free their pages: swap to host memory or recompute; auto: the cheaper one.",
    ),
]
SwapSpace = Annotated[
    int | None,
    _flag(
        "swap-space",
        "Host memory for swapped pages, for example 4GiB; 0: none; default: half of the KV memory, at most 1GiB.",
        parser=_swap_space,
        metavar="SIZE",
    ),
]
TensorParallelSize = Annotated[
    int,
    _flag(
        "tensor-parallel-size",
        "Number of processes (ranks) that compute each layer together (native decoders on CPUs).",
        min=1,
        max=64,
    ),
]
Deterministic = Annotated[
    bool,
    _flag(
        "deterministic",
        "Compute bit-identical logits for the same tokens, whatever the batch (on GPUs native decoders only; slower).",
        show_default=False,
    ),
]
NoPrefixCaching = Annotated[
    bool, _flag("no-prefix-caching", "Do not reuse cached pages: compute every prompt completely.", show_default=False)
]
Seed = Annotated[int, _flag("seed", "Base seed of requests without a seed.", min=0, max=2**63 - 1)]
ServedModelName = Annotated[
    str | None,
    _flag("served-model-name", "Model name in the API; default: the id or the folder's name.", show_default=False),
]

Host = Annotated[str, _flag("host", "Address to listen on.")]
Port = Annotated[int, _flag("port", "Port to listen on; 0 selects a free one.", min=0, max=65535)]
ApiKey = Annotated[
    list[str], _flag("api-key", "API key that clients must send; may be given several times.", show_default=False)
]
Db = Annotated[str, _flag("db", "SQLite file of the conversations.", parser=_db, metavar="TEXT")]
DbFile = Annotated[str, _flag("db", "SQLite file of the conversations.", parser=_db_file, metavar="TEXT")]
RedisUrl = Annotated[
    str,
    _flag(
        "redis",
        "Redis server for the conversations, instead of --db: redis://user:password@host:6379/0 "
        "or redis://user@host:6379/0?password_file=FILE; with Sentinels "
        "redis+sentinel://user:password@host:26379,host:26379/service/0.",
        parser=_redis_url,
        metavar="URL",
        show_default=False,
    ),
]
Bus = Annotated[
    str,
    _flag(
        "bus",
        "Redis server that connects gateways and workers, written as for --redis; it needs no persistence.",
        parser=_redis_url,
        metavar="URL",
        show_default=False,
    ),
]
WorkerName = Annotated[
    str | None,
    _flag(
        "worker-name",
        "Name that stays the same when the worker restarts; default: the host's name.",
        show_default=False,
    ),
]
ReadyFile = Annotated[
    Path | None,
    _flag(
        "ready-file",
        "File that exists while the worker accepts requests, for a readiness probe.",
        dir_okay=False,
        show_default=False,
    ),
]
Routing = Annotated[
    Literal["cost", "hash"],
    _flag(
        "routing",
        "How a worker is chosen: cost (fewest seconds, given what each has cached and has to do), or hash of the "
        "conversation.",
    ),
]
SseKeepAliveInterval = Annotated[
    float,
    _flag(
        "sse-keep-alive-interval",
        "Seconds without data before a keep-alive comment is sent; 0: never.",
        number=float,
        min=0,
        max=3600,
    ),
]
DisconnectGracePeriod = Annotated[
    float,
    _flag(
        "disconnect-grace-period",
        "Seconds that a stored response continues after its last reader disconnected.",
        number=float,
        min=0,
        max=86400,
    ),
]
DrainTimeout = Annotated[
    float,
    _flag(
        "drain-timeout",
        "Seconds that running answers have to finish when the server shuts down.",
        number=float,
        min=0,
        max=86400,
    ),
]
AllowedHost = Annotated[
    list[str],
    _flag(
        "allowed-host",
        "Additional host name that the server answers to; may be given several times.",
        show_default=False,
    ),
]
CorsOrigin = Annotated[
    list[str],
    _flag("cors-origin", "Web origin whose pages may call the API; may be given several times.", show_default=False),
]
RootPath = Annotated[str, _flag("root-path", "Path prefix under which a proxy serves the server.", show_default=False)]
SharedSystemPrompt = Annotated[
    list[Path],
    _flag(
        "shared-system-prompt",
        "File with a system prompt whose pages are shared by all tenants; may be given several times.",
        metavar="FILE",
        show_default=False,
    ),
]
ToolCallParser = Annotated[
    Literal["auto", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "none"],
    _flag("tool-call-parser", "Syntax of the model's function calls; auto: derived from the chat template."),
]
ReasoningParser = Annotated[
    Literal["auto", "qwen3", "deepseek_r1", "none"],
    _flag("reasoning-parser", "Syntax of the model's reasoning; deepseek_r1: every reply begins with it."),
]
McpConfig = Annotated[
    Path | None,
    _flag(
        "mcp-config",
        "TOML file with the MCP servers whose tools the chat page offers (needs chatcache[mcp]).",
        metavar="FILE",
        show_default=False,
    ),
]
LogFormat = Annotated[
    Literal["text", "json"], _flag("log-format", "Format of log lines: text, or one JSON object per line.")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], _flag("log-level", "Minimum level of log lines on stderr.")
]
