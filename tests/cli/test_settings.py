"""Sources and precedence of settings, and values that are refused before the start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from chatcache import __version__
from chatcache.cli.main import app, main
from chatcache.cli.options import RENAMED_OPTIONS
from chatcache.config import EngineConfig, ServerConfig, format_size, parse_size, read_config_file, settings_by_command
from chatcache.errors import InvalidRequestError

NO_FRAME = str.maketrans("", "", "│'")
Seen = list[tuple[EngineConfig, ServerConfig]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    """Replace `run_server`, in an empty folder; return the settings it is called with."""
    calls: Seen = []

    def run_server(engine: EngineConfig, server: ServerConfig) -> int:
        calls.append((engine, server))
        return 0

    monkeypatch.setattr("chatcache.cli.server.run_server", run_server)
    monkeypatch.setattr("chatcache.cli.serve.check_model_folder", lambda config: None)
    monkeypatch.chdir(tmp_path)
    return calls


def serve(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments], env=env)


def variable(name: str) -> str:
    return "CHATCACHE_" + name.upper().replace("-", "_")


def test_serve_without_options_uses_the_defaults(seen: Seen) -> None:
    assert serve().exit_code == 0
    assert seen == [(EngineConfig(served_model_name="chatcache-builtin"), ServerConfig())]


@pytest.mark.parametrize(
    ("flag", "file", "env", "expected"),
    [
        (None, None, None, 8000),
        (None, 1, None, 1),
        (None, 1, 2, 2),
        (3, 1, 2, 3),
        (3, None, 2, 3),
        (3, 1, None, 3),
    ],
)
def test_flag_beats_environment_beats_file_beats_default(
    seen: Seen, flag: int | None, file: int | None, env: int | None, expected: int
) -> None:
    if file is not None:
        Path("chatcache.toml").write_text(f"port = {file}\n")
    result = serve(
        *([] if flag is None else ["--port", str(flag)]), env=None if env is None else {"CHATCACHE_PORT": str(env)}
    )
    assert result.exit_code == 0, result.output
    assert seen[0][1].port == expected


@pytest.mark.parametrize("store", [{"db": "x.db"}, {"redis": "redis://somewhere/0"}], ids=["db", "redis"])
def test_every_setting_has_a_flag_an_environment_variable_and_a_line_in_the_file(
    seen: Seen, store: dict[str, str]
) -> None:
    values = {
        "model": "some/model",
        "host": "0.0.0.0",
        "port": "1234",
        "device": "cpu",
        "dtype": "float32",
        "attention-backend": "reference",
        "quantization": "int8",
        "chat-template": "own.jinja",
        "pooling": "mean",
        "kv-cache-dtype": "fp8",
        "kv-memory": "1.5GiB",
        "max-model-len": "99",
        "tensor-parallel-size": "2",
        "page-size": "32",
        "max-num-seqs": "7",
        "max-num-batched-tokens": "64",
        "max-queued-requests": "5",
        "scheduling-policy": "fair",
        "preemption-mode": "swap",
        "swap-space": "1GiB",
        "deterministic": "true",
        "no-prefix-caching": "true",
        "seed": "11",
        "served-model-name": "name",
        "api-key": "secret-key-1",
        **store,
        "sse-keep-alive-interval": "2.5",
        "disconnect-grace-period": "4.5",
        "drain-timeout": "7.5",
        "tool-call-parser": "hermes",
        "reasoning-parser": "deepseek_r1",
        "allowed-host": "example.org",
        "cors-origin": "https://example.org",
        "root-path": "/api/",
        "shared-system-prompt": "kind.txt",
        "log-level": "debug",
    }
    Path("kind.txt").write_text("Be kind.\n")
    switches = ("no-prefix-caching", "deterministic")
    flags = [values["model"], *(f"--{name}" for name in switches)]
    for name, value in values.items():
        if name not in ("model", *switches):
            flags += [f"--{name}", value]
    assert serve(*flags).exit_code == 0
    assert (
        serve(env={"CHATCACHE_" + name.upper().replace("-", "_"): value for name, value in values.items()}).exit_code
        == 0
    )
    lists = ("api-key", "allowed-host", "cors-origin", "shared-system-prompt")
    lines = [f'{name} = ["{value}"]' if name in lists else f'{name} = "{value}"' for name, value in values.items()]
    Path("chatcache.toml").write_text("\n".join(lines))
    result = serve()
    assert result.exit_code == 0, result.output
    assert seen[0] == seen[1] == seen[2]
    assert seen[0] == (
        EngineConfig(
            model="some/model",
            served_model_name="name",
            device="cpu",
            dtype="float32",
            attention_backend="reference",
            quantization="int8",
            chat_template="own.jinja",
            pooling="mean",
            kv_cache_dtype="fp8",
            kv_memory_bytes=3 * 2**29,
            max_model_len=99,
            tensor_parallel_size=2,
            page_size=32,
            max_num_seqs=7,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            max_queued_requests=5,
            scheduling_policy="fair",
            preemption_mode="swap",
            swap_space_bytes=2**30,
            deterministic=True,
            seed=11,
        ),
        ServerConfig(
            host="0.0.0.0",
            port=1234,
            api_keys=("secret-key-1",),
            db=store.get("db", ServerConfig().db),
            redis=store.get("redis", ""),
            sse_keep_alive_interval_s=2.5,
            disconnect_grace_period_s=4.5,
            drain_timeout_s=7.5,
            allowed_hosts=("example.org",),
            cors_origins=("https://example.org",),
            root_path="/api",
            shared_system_prompts=("Be kind.\n",),
            tool_call_parser="hermes",
            reasoning_parser="deepseek_r1",
            log_level="debug",
        ),
    )


def test_preemption_by_swap_without_swap_space_is_refused(seen: Seen) -> None:
    result = serve("--preemption-mode", "swap", "--swap-space", "0")
    assert result.exit_code == 2 and "--preemption-mode" in result.output and not seen
    assert serve("--preemption-mode", "recompute", "--swap-space", "0").exit_code == 0


def test_shared_system_prompts_are_read_from_flags_and_environment(seen: Seen) -> None:
    for name in ("a", "b"):
        Path(name).write_text(f"You are {name}, é.", encoding="utf-8")
    serve("--shared-system-prompt", "a", "--shared-system-prompt", "b")
    serve(env={"CHATCACHE_SHARED_SYSTEM_PROMPT": f"a{os.pathsep}b"})
    assert [server.shared_system_prompts for _, server in seen] == [("You are a, é.", "You are b, é.")] * 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "is not a file"),
        (b" \n", "is empty"),
        (b"\xff", "is not UTF-8"),
        (b"x" * (2**20 + 1), "larger than 1 MiB"),
    ],
)
def test_unusable_shared_system_prompt_file_is_refused(seen: Seen, data: bytes | None, reason: str) -> None:
    if data is not None:
        Path("p").write_bytes(data)
    result = serve("--shared-system-prompt", "p")
    assert result.exit_code == 2 and not seen
    assert "--shared-system-prompt" in result.output and reason in " ".join(result.output.replace("│", " ").split())


def test_allowed_hosts_and_origins_are_compared_as_browsers_send_them(seen: Seen) -> None:
    hosts, origins = ("chat.example", "[::1]", "10.0.0.1", "*"), ("HTTPS://App.Example:8443/", "app://own", "null")
    flags = [f"--allowed-host={host}" for host in hosts] + [f"--cors-origin={origin}" for origin in origins]
    assert serve(*flags).exit_code == 0
    assert seen[0][1].allowed_hosts == ("chat.example", "::1", "10.0.0.1", "*")
    assert seen[0][1].cors_origins == ("https://app.example:8443", "app://own", "null")


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--allowed-host", ("https://chat.example", "chat.example:443", "chat.example/", "*.example", "[::1]:80", "")),
        ("--cors-origin", ("app.example", "*", "https://*.example", "https://app.example/path", "https://", "")),
    ],
)
def test_host_or_origin_that_no_browser_sends_is_refused(seen: Seen, flag: str, values: Sequence[str]) -> None:
    for value in values:
        result = serve(flag, value)
        assert result.exit_code == 2 and flag in result.output, value
    assert not seen


def test_api_keys_are_read_from_flags_and_environment(seen: Seen) -> None:
    serve("--api-key", "first-key", "--api-key", "second-key")
    serve(env={"CHATCACHE_API_KEY": "first-key second-key"})
    assert [server.api_keys for _, server in seen] == [("first-key", "second-key")] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "-1"),
        ("port", "65536"),
        ("port", "http"),
        ("host", "127.0.0.1:8000"),
        ("device", "tpu"),
        ("dtype", "int3"),
        ("attention-backend", "none"),
        ("kv-memory", "2 buckets"),
        ("kv-memory", "1KiB"),
        ("kv-memory", "999TiB"),
        ("kv-memory", "-1"),
        ("max-model-len", "15"),
        ("max-model-len", "99999999"),
        ("page-size", "0"),
        ("page-size", "17"),
        ("max-num-seqs", "0"),
        ("max-num-seqs", "4097"),
        ("max-num-batched-tokens", "15"),
        ("max-num-batched-tokens", "9999999"),
        ("max-queued-requests", "-1"),
        ("max-queued-requests", "9999999"),
        ("scheduling-policy", "lifo"),
        ("preemption-mode", "never"),
        ("swap-space", "-1"),
        ("swap-space", "much"),
        ("swap-space", "999TiB"),
        ("seed", "-1"),
        ("seed", "9223372036854775808"),
        ("api-key", "short"),
        ("api-key", "with a space"),
        ("sse-keep-alive-interval", "-1"),
        ("sse-keep-alive-interval", "nan"),
        ("sse-keep-alive-interval", "3601"),
        ("disconnect-grace-period", "-1"),
        ("drain-timeout", "-1"),
        ("tool-call-parser", "xml"),
        ("reasoning-parser", "yes"),
        ("root-path", "no-slash"),
        ("log-level", "loud"),
    ],
)
def test_invalid_value_is_refused_by_flag_name(seen: Seen, name: str, value: str) -> None:
    for result in (serve(f"--{name}={value}"), serve(env={variable(name): value})):
        assert result.exit_code == 2, result.output
        assert f"--{name}" in result.output
    assert not seen


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "unknown setting 'prot'; did you mean 'port'?"),
        ('kv-memroy = "2GiB"', "unknown setting 'kv-memroy'; did you mean 'kv-memory'?"),
        ("kv_memroy = 1\nport = 1", "unknown setting 'kv_memroy'; did you mean 'kv-memory'?"),
        ("colour = 1", "unknown setting 'colour' "),
        ("[serve]\nport = 1", "[serve] is a table"),
        ("port = ", "Invalid"),
        ("port = 70000", "--port"),
        ("port = 80.5", "'80.5' is not a whole number"),
        ("port = true", "'true' is not a whole number"),
        ('kv-memory = "lots"', "--kv-memory"),
    ],
)
def test_bad_settings_file_is_refused(seen: Seen, text: str, reason: str) -> None:
    Path("chatcache.toml").write_text(text)
    result = serve()
    assert result.exit_code == 2
    assert reason in " ".join(result.output.replace("│", " ").split())
    assert not seen


def test_config_option_selects_the_settings_file(seen: Seen) -> None:
    Path("other.toml").write_text("port = 5")
    assert CliRunner().invoke(app, ["--config", "other.toml", "serve"]).exit_code == 0
    assert CliRunner().invoke(app, ["serve"], env={"CHATCACHE_CONFIG": "other.toml"}).exit_code == 0
    assert [server.port for _, server in seen] == [5, 5]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config", "{long}", "serve"),
        ("serve", "--host", "a..b", "--port", "0"),
        ("serve", "--host", "a" * 64, "--port", "0"),
        ("serve", "--db", "{long}", "--port", "0"),
        ("serve", "{long}"),
        ("keys", "create", "--tenant", "acme", "--db", "{long}"),
        ("keys", "list", "--db", "{long}"),
        ("db", "backup", "{long}"),
        ("db", "backup", "copy.db", "--db", "{long}"),
        ("chat", "--url", "http://[::1"),
        ("chat", "--url", "http://127.0.0.1:99999"),
        ("chat", "--url", "http://127.0.0.1:1", "--api-key", "sch\u00fcssel"),
    ],
    ids=" ".join,
)
def test_names_that_the_system_refuses_are_one_line_on_stderr(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["chatcache", *(each.format(long="n" * 300) for each in arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code in (1, 78) and len(lines) == 1 and lines[0].startswith("chatcache: "), lines


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://u:secret/part@h:6379/0", "write / ? # @ % as"),
        ("redis://u:secret#part@h:6379/0", "write / ? # @ % as"),
        ("redis://u:secret@h:99999/0", "write / ? # @ % as"),
        ("redis://u:secret@h:6379/first", "must be a number"),
        ("redis://u:secret@h:6379/0?colour=red", "unknown: 'colour'"),
        ("redis+sentinel://u:secret@h:26379/store/0?colour=red", "unknown: 'colour'"),
        ("http://u:secret@h", "schemes"),
    ],
)
def test_url_of_redis_is_checked_before_the_start_without_showing_its_password(
    seen: Seen, url: str, reason: str
) -> None:
    for command, flag in (("serve", "--redis"), ("worker", "--bus"), ("gateway", "--bus")):
        result = CliRunner().invoke(app, [command, flag, url], env={"COLUMNS": "200"})
        text = " ".join(result.output.replace("│", "").split())
        assert result.exit_code == 2 and reason in text and "secret" not in text, text
    assert not seen


def test_empty_name_of_the_store_is_refused(seen: Seen) -> None:
    result = serve("--db", "")
    assert result.exit_code == 2 and "must name a file" in result.output and not seen
    assert serve(env={"CHATCACHE_DB": ""}).exit_code == 0 and seen[0][1].db == "chatcache.db"


@pytest.mark.parametrize(("name", "value"), [("port", "x"), ("root-path", "no-slash"), ("device", "tpu")])
def test_bad_value_names_the_variable_or_file_that_contains_it(seen: Seen, name: str, value: str) -> None:
    by_flag, by_variable = serve(f"--{name}", value), serve(env={variable(name): value})
    Path("chatcache.toml").write_text(f'{name} = "{value}"')
    by_file = serve()
    assert {by_flag.exit_code, by_variable.exit_code, by_file.exit_code} == {2} and not seen
    texts = ["".join(each.output.translate(NO_FRAME).split()) for each in (by_flag, by_variable, by_file)]
    assert all(f"Invalidvaluefor--{name}:{value}" in text for text in texts)
    assert "given" not in texts[0]
    assert f"(givenbytheenvironmentvariable{variable(name)})." in texts[1]
    assert "(givenbythesettingsfilechatcache.toml)." in texts[2]


def test_config_option_of_a_command_is_refused_with_its_place() -> None:
    result = CliRunner().invoke(app, ["doctor", "--config", "x.toml"])
    assert result.exit_code == 2 and "chatcache --config FILE COMMAND" in result.stderr


@pytest.mark.parametrize("name", ["nope.toml", "folder"])
def test_missing_settings_file_is_refused_unless_it_is_the_default_one(seen: Seen, name: str) -> None:
    Path("folder").mkdir()
    by_flag = CliRunner().invoke(app, ["--config", name, "serve"])
    by_variable = CliRunner().invoke(app, ["serve"], env={"CHATCACHE_CONFIG": name})
    assert (by_flag.exit_code, by_variable.exit_code) == (2, 2) and not seen
    for result, source in ((by_flag, "--config"), (by_variable, "CHATCACHE_CONFIG")):
        text = "".join(result.output.replace("│", "").split())
        assert "nosuchfile" in text and name in text and source in text
    assert serve(env={"CHATCACHE_CONFIG": ""}).exit_code == 0


@pytest.mark.slow
def test_help_imports_no_server_and_no_model_library() -> None:
    """`chatcache --help` answers at once, because commands import what they need when they run."""
    script = (
        "import sys, chatcache.cli.main\n"
        "print([name for name in ('starlette', 'torch', 'transformers', 'uvicorn') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_option_prints_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"chatcache {__version__}\n")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("1k", 1000),
        ("1KiB", 1024),
        ("1.5 MiB", 3 * 2**19),
        ("2gib", 2**31),
        ("2GB", 2 * 10**9),
        (" 3 T ", 3 * 10**12),
    ],
)
def test_parse_size_accepts_units(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1e9", "0x10", "1 000", "1PiB", "-1", "1.5.5", "1bb", "nan"])
def test_parse_size_refuses_other_text(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a size"):
        parse_size(text)


@given(st.integers(0, 2**50))
def test_formatted_size_is_parsed_back_within_its_digits(num_bytes: int) -> None:
    assert parse_size(format_size(num_bytes), high=2**51) == pytest.approx(num_bytes, rel=0.01)


def test_read_config_file_refuses_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("#" * (1024 * 1024 + 1))
    with pytest.raises(InvalidRequestError, match="larger than"):
        read_config_file(tmp_path / "c.toml")


def test_settings_by_command_contain_the_commands_own_flags() -> None:
    flags: dict[str, Any] = {"serve": ["port", "device"], "chat": ["device"]}
    assert settings_by_command({"port": 1, "device": "cpu"}, flags, Path("f")) == {
        "serve": {"port": 1, "device": "cpu"},
        "chat": {"device": "cpu"},
    }


def test_empty_variable_counts_as_unset(seen: Seen) -> None:
    result = serve(
        env={"CHATCACHE_MODEL": "", "CHATCACHE_API_KEY": "", "CHATCACHE_PORT": "", "CHATCACHE_KV_MEMORY": ""}
    )
    assert result.exit_code == 0, result.output
    assert seen == [(EngineConfig(served_model_name="chatcache-builtin"), ServerConfig())]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CHATCACHE_APIKEY", "CHATCACHE_API_KEY"),
        ("CHATCACHE_PROT", "CHATCACHE_PORT"),
        ("CHATCACHE_REDIS_URL", "CHATCACHE_REDIS"),
        ("CHATCACHE_API_KEY", None),
        ("CHATCACHE_SERVICE_HOST", None),
        ("CHATCACHE_TEST_SEED", None),
    ],
)
def test_misspelt_variable_is_reported_and_others_are_not(seen: Seen, name: str, meant: str | None) -> None:
    result = serve("--api-key", "sk-of-some-length", env={name: "sk-of-some-length"})
    assert result.exit_code == 0
    warning = f"unknown variable {name} is ignored; did you mean {meant}?" if meant else ""
    assert warning in result.stderr and bool(warning) == ("unknown variable" in result.stderr)


@pytest.mark.parametrize(("old", "new"), RENAMED_OPTIONS.items())
def test_former_option_name_is_refused_with_the_current_one(seen: Seen, old: str, new: str) -> None:
    by_flag, by_variable = serve(f"--{old}", "1"), serve(env={variable(old): "1"})
    Path("chatcache.toml").write_text(f'{old} = "1"')
    by_file = serve()
    assert {by_flag.exit_code, by_variable.exit_code, by_file.exit_code} == {2} and not seen
    assert f"--{new}" in by_flag.stderr and variable(new) in by_variable.stderr
    assert new in by_file.stderr.replace("│", "").replace("\n", "")


@pytest.mark.parametrize(("words", "new"), [(["redis-user", "x"], "redis-acl"), (["db", "claim"], "assign-owner")])
def test_former_command_name_is_refused_with_the_current_one(words: list[str], new: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and new in result.stderr


@pytest.mark.parametrize("ending", ["APIKEY", "API_KEYS", "API_KEY_FILE", "AIP_KEY"])
def test_serve_with_the_api_key_in_a_misspelt_variable_is_refused(seen: Seen, ending: str) -> None:
    name = f"CHATCACHE_{ending}"
    result = serve(env={name: "sk-of-some-length"})
    assert result.exit_code == 78 and seen == []
    assert f"not started, because it would need no API key: {name} is set" in result.stderr
    assert "Rename it to CHATCACHE_API_KEY" in result.stderr and "sk-of-some-length" not in result.output
    assert serve(env={name: "sk-of-some-length", "CHATCACHE_API_KEY": "sk-of-some-length"}).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "abc"), "'abc' is not a whole number from 0 to 65535"),
        (("--port", "8000.5"), "'8000.5' is not a whole number from 0 to 65535"),
        (("--port", "70000"), "must be at most 65535, got 70000"),
        (("--drain-timeout", "soon"), "'soon' is not a number from 0 to 86400"),
        (("--drain-timeout", "nan"), "nan is not a number from 0 to 86400"),
        (("--max-model-len", "8"), "must be at least 16, got 8"),
    ],
)
def test_serve_number_out_of_range_names_the_range(seen: Seen, arguments: tuple[str, str], words: str) -> None:
    result = serve(*arguments)
    assert result.exit_code == 2 and seen == []
    text = " ".join(result.output.replace("│", " ").split())
    assert f"Invalid value for '{arguments[0]}': {words}." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "kv", "--batch", "many"), "'many' is not a whole number from 1 to 4096"),
        (("chat", "--temperature", "hot"), "'hot' is not a number from 0 to 2"),
        (("chat", "--top-p", "0"), "must be at least 1e-06, got 0"),
        (("keys", "create", "--tenant", "a", "--max-concurrent", "0"), "must be at least 1, got 0"),
        (("keys", "create", "--tenant", "a", "--max-concurrent", "x"), "'x' is not a whole number of 1 or more"),
    ],
)
def test_number_out_of_range_of_other_commands_names_the_range(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert f"Invalid value for '{arguments[-2]}': {words}." in text


REDIS = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("command", [("serve",), ("doctor",), ("keys", "list"), ("db", "export", "copy.jsonl")])
@pytest.mark.parametrize(
    ("flags", "env", "file", "sources"),
    [
        (("--db", "x.db", "--redis", REDIS), {}, "", "--db by a flag, --redis by a flag"),
        (
            ("--redis", REDIS),
            {"CHATCACHE_DB": "x.db"},
            "",
            "--db by the environment variable CHATCACHE_DB, --redis by a flag",
        ),
        (("--db", "x.db"), {}, f'redis = "{REDIS}"', "--db by a flag, --redis by the settings file"),
        ((), {}, f'db = "x.db"\nredis = "{REDIS}"', "--db by the settings file, --redis by the settings file"),
    ],
)
def test_db_together_with_redis_is_refused(
    seen: Seen, command: tuple[str, ...], flags: tuple[str, ...], env: dict[str, str], file: str, sources: str
) -> None:
    Path("chatcache.toml").write_text(file)
    result = CliRunner().invoke(app, [*command, *flags], env=env)
    assert result.exit_code == 2 and seen == []
    text = " ".join(result.output.replace("│", " ").split())
    assert f"both are given ({sources}), and conversations are kept in one store; remove one of them." in text


def test_redis_of_a_flag_or_variable_replaces_the_db_of_the_settings_file(seen: Seen) -> None:
    """As in the Docker image, whose settings file names the file in the volume."""
    Path("chatcache.toml").write_text('db = "/data/chatcache.db"')
    for result in (serve("--redis", REDIS), serve(env={"CHATCACHE_REDIS": REDIS}), serve(env={"CHATCACHE_REDIS": ""})):
        assert result.exit_code == 0, result.output
    assert [(config.redis, config.db) for _, config in seen] == [
        (REDIS, "/data/chatcache.db"),
        (REDIS, "/data/chatcache.db"),
        ("", "/data/chatcache.db"),
    ]
