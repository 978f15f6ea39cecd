"""Mutations of a valid model folder, as data: the change and the expected error message."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
NORM = "model.norm.weight"
MARKER_FILE = "marker.txt"
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class Mutation:
    """A change of the folder; the error must name `file` and contain `words`."""

    corrupt: Callable[[Path], Any]
    file: str
    words: str = ""


class WritesMarker:
    """A pickle that writes a marker file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self._marker, "the pickle was read"))


def config(**fields: Any) -> Callable[[Path], Any]:
    """Set fields of config.json; `...` removes a field."""
    return lambda folder: _edit(folder / CONFIG, fields)


def _edit(path: Path, fields: dict[str, Any]) -> None:
    value = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: each for name, each in value.items() if each is not ...}))


def replace_by_folder(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


def text(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def raw_config(field: str, literal: str) -> Callable[[Path], Any]:
    """Put a literal into config.json that `json.dumps` would not write."""

    def corrupt(folder: Path) -> None:
        value = json.loads((folder / CONFIG).read_text())
        value.pop(field, None)
        (folder / CONFIG).write_text(json.dumps(value)[:-1] + f', "{field}": {literal}}}')

    return corrupt


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Change the header of the weights and keep the data after it."""

    def corrupt(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length])
        changed = change(fields)
        raw = changed if isinstance(changed, bytes) else json.dumps(fields).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])

    return corrupt


def entry(name: str = NORM, **fields: Any) -> Callable[[Path], Any]:
    return header(lambda found: found[name].update(fields))


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def corrupt(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return corrupt


def cut(num_bytes: int) -> Callable[[Path], Any]:
    """Keep the first bytes of the weights, or all but the last ones."""

    def corrupt(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[:num_bytes])

    return corrupt


def append_data(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(bytes(64))


def length(value: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / WEIGHTS).write_bytes(struct.pack("<Q", value) + (folder / WEIGHTS).read_bytes()[8:])


def shards(*names: str) -> Callable[[Path], Any]:
    """Write an index that maps tensors to these files; the real weights are in `a.safetensors`."""

    def corrupt(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        tensors = dict(enumerate(load_file(folder / "a.safetensors")))
        places = {name: names[at % len(names)] for at, name in tensors.items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))

    return corrupt


def index(content: Any) -> Callable[[Path], Any]:
    def corrupt(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))

    return corrupt


def duplicate_shard(folder: Path) -> None:
    """Store the same tensors in two shards."""
    data = (folder / WEIGHTS).read_bytes()
    (folder / "b.safetensors").write_bytes(data)
    shards("a.safetensors", "b.safetensors")(folder)


def linked(name: str) -> Callable[[Path], Any]:
    """Replace a file of the folder by a link to a file outside."""

    def corrupt(folder: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return corrupt


def link_to_nothing(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("nowhere.safetensors")


def link_to_itself(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(WEIGHTS)


def linked_shard(folder: Path) -> None:
    shards("a.safetensors")(folder)
    linked("a.safetensors")(folder)


def pickled(name: str) -> Callable[[Path], Any]:
    """Replace the weights by a pickle that runs code when loaded."""

    def corrupt(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(pickle.dumps(WritesMarker(folder / MARKER_FILE)))

    return corrupt


def renamed_pickle(folder: Path) -> None:
    pickled(WEIGHTS)(folder)


def remote_code(folder: Path) -> None:
    """A model whose configuration, network and tokenizer classes are code of the folder."""
    code = f"from pathlib import Path\nPath({str(folder / MARKER_FILE)!r}).write_text('the code was run')\n"
    for name in ("configuration_x.py", "modeling_x.py", "tokenization_x.py"):
        (folder / name).write_text(code)
    own = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoModelForCausalLM": "modeling_x.X",
        "AutoTokenizer": ["tokenization_x.X", None],
    }
    _edit(folder / CONFIG, {"auto_map": own})
    _edit(folder / TOKENIZER_CONFIG, {"auto_map": own, "tokenizer_class": "X"})


def unknown_with_code(folder: Path) -> None:
    remote_code(folder)
    _edit(folder / CONFIG, {"model_type": "x"})


def template(source: str) -> Callable[[Path], Any]:
    return text(TEMPLATE, source)


def tokenizer(**fields: Any) -> Callable[[Path], Any]:
    return lambda folder: _edit(folder / TOKENIZER, fields)


def pattern(regex: str) -> Callable[[Path], Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=split)


DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 10_000
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TREE = "{% macro f(n) %}{% if n < 64 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}"
SHARING = (
    "{% set ns = namespace(x=['ab'], y=('ab',), z=['ab']) %}{% for i in range(LEVELS) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = (ns.y, ns.y) %}{% set ns.z = [ns.z, ns.z] %}{% endfor %}BODY"
)
GROWING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = BODY %}{% endfor %}"

MUTATIONS: dict[str, Mutation] = {
    # config.json
    "config missing": Mutation(lambda folder: (folder / CONFIG).unlink(), CONFIG, "missing"),
    "config is a folder": Mutation(replace_by_folder, CONFIG, "cannot be read"),
    "config cut": Mutation(text(CONFIG, '{"model_type"'), CONFIG, "not valid JSON"),
    "config empty": Mutation(text(CONFIG, ""), CONFIG, "not valid JSON"),
    "config binary": Mutation(text(CONFIG, b"\xff\xfe\x00"), CONFIG, "cannot be read"),
    "config a list": Mutation(text(CONFIG, "[1]"), CONFIG, "not a JSON object"),
    "config deep": Mutation(text(CONFIG, '{"a":' + DEEP + "}"), CONFIG, "not valid JSON"),
    "config deep field": Mutation(raw_config("rope_scaling", '{"a":' * 50_000 + "1" + "}" * 50_000), CONFIG),
    "config many digits": Mutation(raw_config("vocab_size", DIGITS), CONFIG, "not valid JSON"),
    "config no type": Mutation(config(model_type=...), CONFIG, "model_type"),
    "config type a list": Mutation(config(model_type=["llama"]), CONFIG, "model_type"),
    "config type unknown": Mutation(config(model_type="x"), CONFIG, "not known"),
    "config layers huge": Mutation(config(num_hidden_layers=10**9), CONFIG, "num_hidden_layers"),
    "config layers huge, other family": Mutation(config(model_type="gpt2", n_layer=10**9), CONFIG, "n_layer"),
    "config positions huge": Mutation(config(max_position_embeddings=2**62), CONFIG, "max_position_embeddings"),
    "config vocabulary huge": Mutation(config(vocab_size=2**62), CONFIG, "vocab_size"),
    "config vocabulary of another model": Mutation(config(vocab_size=2**30), WEIGHTS, "embed_tokens"),
    "config hidden huge": Mutation(config(hidden_size=10**30), CONFIG, "hidden_size"),
    "config hidden zero": Mutation(config(hidden_size=0), CONFIG, "hidden_size"),
    "config heads negative": Mutation(config(num_attention_heads=-4), CONFIG, "num_attention_heads"),
    "config heads more than hidden": Mutation(config(num_attention_heads=4096, head_dim=...), CONFIG),
    "config theta infinite": Mutation(raw_config("rms_norm_eps", "Infinity"), CONFIG, "rms_norm_eps"),
    "config epsilon not a number": Mutation(raw_config("rms_norm_eps", "NaN"), CONFIG, "rms_norm_eps"),
    "config rope a text": Mutation(config(rope_parameters={"rope_theta": "x"}, rope_theta=...), CONFIG),
    "config architectures numbers": Mutation(config(architectures=[1, 2]), CONFIG, "cannot be loaded"),
    "eos not an id": Mutation(text("generation_config.json", '{"eos_token_id": [[]]}'), "generation_config.json"),
    "eos deep": Mutation(text("generation_config.json", DEEP), "generation_config.json", "JSON"),
    # safetensors
    "weights missing": Mutation(lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS, "missing"),
    "weights empty": Mutation(cut(0), WEIGHTS, "truncated"),
    "weights cut in the length": Mutation(cut(7), WEIGHTS, "truncated"),
    "weights cut in the header": Mutation(cut(300), WEIGHTS, "truncated"),
    "weights cut in the data": Mutation(cut(-8), WEIGHTS, "truncated"),
    "weights with extra data": Mutation(append_data, WEIGHTS, "belong to no tensor"),
    "header length 0": Mutation(length(0), WEIGHTS, "not safetensors"),
    "header length 1": Mutation(length(1), WEIGHTS, "not safetensors"),
    "header length huge": Mutation(length(2**64 - 1), WEIGHTS, "header of"),
    "header not JSON": Mutation(header(lambda _: b"{" * 64), WEIGHTS, "not JSON"),
    "header not UTF-8": Mutation(header(lambda _: b'{"\xff": 1}'), WEIGHTS, "not JSON"),
    "header deep": Mutation(header(lambda _: DEEP.encode()), WEIGHTS, "not JSON"),
    "header many digits": Mutation(header(lambda _: b'{"a":' + DIGITS.encode() + b"}"), WEIGHTS, "not JSON"),
    "header a list": Mutation(header(lambda _: b"[]"), WEIGHTS, "not a JSON object"),
    "header entry a text": Mutation(header(lambda found: found.update({NORM: "x"})), WEIGHTS, NORM),
    "header twice the same name": Mutation(header(lambda _: b'{"a":1,"a":2}'), WEIGHTS, "twice"),
    "dtype unknown": Mutation(entry(dtype="F1"), WEIGHTS, NORM),
    "dtype a list": Mutation(entry(dtype=["F32"]), WEIGHTS, NORM),
    "dtype of another size": Mutation(entry(dtype="F64"), WEIGHTS, NORM),
    "dtype whole numbers": Mutation(entry(dtype="I32"), WEIGHTS, "quantised"),
    "shape negative": Mutation(entry(shape=[-64]), WEIGHTS, NORM),
    "shape overflows": Mutation(entry(shape=[2**40, 2**40]), WEIGHTS, NORM),
    "shape true": Mutation(entry(shape=[True]), WEIGHTS, NORM),
    "shape of another model": Mutation(entry(shape=[8, 8]), WEIGHTS, NORM),
    "offsets backwards": Mutation(entry(data_offsets=[256, 0]), WEIGHTS, NORM),
    "offsets beyond the end": Mutation(entry(data_offsets=[2**40, 2**40 + 256]), WEIGHTS, NORM),
    "offsets overlap": Mutation(entry(data_offsets=[0, 256]), WEIGHTS),
    "tensors with a gap": Mutation(header(lambda found: found.pop(NORM)), WEIGHTS),
    "tensor missing": Mutation(weights(lambda found: found.pop(NORM)), WEIGHTS, NORM),
    "tensors of more layers": Mutation(config(num_hidden_layers=1), CONFIG, "num_hidden_layers is 1"),
    "weight not a number": Mutation(weights(lambda found: found[NORM][3:4].fill_(torch.nan)), WEIGHTS, NORM),
    "weight infinite": Mutation(weights(lambda found: found[NORM][:1].fill_(-torch.inf)), WEIGHTS, NORM),
    "one embedding not a number": Mutation(
        weights(lambda found: found["model.embed_tokens.weight"][200, 5:6].fill_(torch.nan)), WEIGHTS, "embed_tokens"
    ),
    # shards and links
    "shard missing": Mutation(shards("a.safetensors", "b.safetensors"), "b.safetensors", "missing"),
    "shard in the folder above": Mutation(shards("../a.safetensors"), INDEX, "outside the folder"),
    "shard absolute": Mutation(shards("/etc/passwd"), INDEX, "outside the folder"),
    "shard is the folder": Mutation(shards("."), INDEX, "outside the folder"),
    "shard with a NUL": Mutation(shards("a\x00.safetensors"), ""),
    "shards with the same tensors": Mutation(duplicate_shard, ".safetensors", "is in"),
    "index without a map": Mutation(index({"metadata": {}}), INDEX, "weight_map"),
    "index of numbers": Mutation(index({"weight_map": {"a": 1}}), INDEX, "weight_map"),
    "index deep": Mutation(index('{"weight_map":' + DEEP + "}"), INDEX, "not valid JSON"),
    "weights a link outside": Mutation(linked(WEIGHTS), WEIGHTS, "outside the folder"),
    "shard a link outside": Mutation(linked_shard, "a.safetensors", "outside the folder"),
    "config a link outside": Mutation(linked(CONFIG), CONFIG, "outside the folder"),
    "tokenizer a link outside": Mutation(linked(TOKENIZER), TOKENIZER, "outside the folder"),
    "weights a link to nothing": Mutation(link_to_nothing, WEIGHTS, "nowhere"),
    "weights a link to itself": Mutation(link_to_itself, WEIGHTS),
    # code
    "pickle .bin": Mutation(pickled("pytorch_model.bin"), "pytorch_model.bin", "pickled weights are refused"),
    "pickle .pt": Mutation(pickled("model.pt"), "model.pt", "pickled weights are refused"),
    "pickle .pth": Mutation(pickled("consolidated.00.pth"), "consolidated.00.pth", "pickled weights are refused"),
    "pickle .npz": Mutation(pickled("weights.npz"), "weights.npz", "pickled weights are refused"),
    "pickle named safetensors": Mutation(renamed_pickle, WEIGHTS, "not safetensors"),
    "gguf": Mutation(lambda folder: (folder / WEIGHTS).rename(folder / "model.gguf"), "model.gguf", "only safetensors"),
    "code for an unknown type": Mutation(unknown_with_code, CONFIG, "code from the folder is never run"),
    # tokenizer
    "tokenizer missing": Mutation(lambda folder: (folder / TOKENIZER).unlink(), TOKENIZER, "missing"),
    "tokenizer cut": Mutation(text(TOKENIZER, '{"version"'), TOKENIZER, "not a tokenizer file"),
    "tokenizer deep": Mutation(text(TOKENIZER, DEEP), TOKENIZER, "not a tokenizer file"),
    "tokenizer of another kind": Mutation(tokenizer(model={"type": "x"}), TOKENIZER, "not a tokenizer file"),
    "tokenizer panics": Mutation(pattern("(a+)+$"), TOKENIZER, "not a tokenizer file"),
    "tokenizer pattern": Mutation(pattern("("), TOKENIZER, "not a tokenizer file"),
    "tokenizer config deep": Mutation(text(TOKENIZER_CONFIG, DEEP), TOKENIZER_CONFIG, "JSON"),
    "tokenizer config a text": Mutation(text(TOKENIZER_CONFIG, '"x"'), TOKENIZER_CONFIG, "JSON object"),
    # chat templates
    "template does not compile": Mutation(template("{% for %}"), TEMPLATE, "does not compile"),
    "template a number": Mutation(
        lambda folder: _edit(folder / TOKENIZER_CONFIG, {"chat_template": 1}), TOKENIZER_CONFIG, "must be text"
    ),
    "template not UTF-8": Mutation(text(TEMPLATE, b"\xff"), TEMPLATE, "not readable"),
    "template nested": Mutation(template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"), TEMPLATE, "not compile"),
    "template digits": Mutation(template("{{ " + DIGITS + " }}"), TEMPLATE, "does not compile"),
    "template includes": Mutation(template("{% include '/etc/passwd' %}"), TEMPLATE, "may not load others"),
    "template imports": Mutation(template("{% from 'os' import path %}"), TEMPLATE, "may not load others"),
    "template mro": Mutation(template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), TEMPLATE, "refused"),
    "template globals": Mutation(template("{{ self.__init__.__globals__ }}"), TEMPLATE, "refused"),
    "template cycler": Mutation(
        template("{{ cycler.__init__.__globals__.os.popen('touch marker.txt').read() }}"), TEMPLATE, "refused"
    ),
    "template attr": Mutation(template("{{ ''|attr('__class__')|attr('mro') }}{{ ''.__class__.a }}"), TEMPLATE),
    "template format": Mutation(template("{{ '{0.__class__.__mro__}'.format('') }}"), TEMPLATE, "refused"),
    "template namespace": Mutation(template("{{ namespace(__class__=1) }}"), TEMPLATE, "may not set"),
    "template changes its messages": Mutation(template("{{ messages.append(1) }}"), TEMPLATE, "refused"),
    "template without end": Mutation(template(LOOP), TEMPLATE, "terminate"),
    "template that writes without end": Mutation(template(LOOP.replace("}{% endfor", "}x{% endfor")), TEMPLATE),
    "template that calls itself": Mutation(template(TREE), TEMPLATE, "terminate"),
    "template long text": Mutation(template("{{ 'a' * 10**10 }}"), TEMPLATE, "makes a value"),
    "template large power": Mutation(template("{{ 10 ** (10 ** 10) }}"), TEMPLATE, "far too large"),
    "template wide format": Mutation(template("{{ '{:>9999999999}'.format(1) }}"), TEMPLATE, "makes a value"),
    "template wide percent": Mutation(template("{{ '%9999999999d' % 1 }}"), TEMPLATE, "makes a value"),
    "template wide center": Mutation(template("{{ 'a'|center(10**10) }}"), TEMPLATE, "makes a value"),
    "template wide ljust": Mutation(template("{{ 'a'.ljust(9999999999) }}"), TEMPLATE, "makes a value"),
    "template list in itself twice": Mutation(
        template(SHARING.replace("LEVELS", "21").replace("BODY", "{{ ns.x }}")), TEMPLATE, "makes a value"
    ),
    **{
        f"template list of lists {name}": Mutation(
            template(SHARING.replace("LEVELS", "60").replace("BODY", f"{{{{ {body} }}}}")), TEMPLATE, "makes a value"
        )
        for name, body in (
            ("printed", "ns.x"),
            ("as text", "ns.x|string|length"),
            ("as JSON", "ns.x|tojson"),
            ("joined", "[ns.x]|join"),
            ("with tilde", "'' ~ ns.x"),
            ("in a percent", "'%s' % ns.x"),
            ("in a format", "'{}'.format(ns.x)"),
            ("mapped", "[ns.x]|map('upper')|first"),
            ("compared", "ns.x == ns.z"),
            ("tested", "ns.x is eq ns.z"),
            ("looked for", "ns.x in [ns.z]"),
            ("counted", "[ns.x].count(ns.z)"),
            ("hashed", "{ns.y: 1}"),
            ("as a key", "{}[ns.y]"),
            ("as a reason", "raise_exception(ns.x)"),
            ("in a namespace", "namespace([(ns.y, 1)])"),
        )
    },
    **{
        f"template doubling by {name}": Mutation(template(GROWING.replace("BODY", body)), TEMPLATE, "makes a value")
        for name, body in (
            ("tilde", "ns.x ~ ns.x"),
            ("plus", "ns.x + ns.x"),
            ("join", "[ns.x, ns.x]|join"),
            ("method", "''.join([ns.x, ns.x])"),
            ("replace", "ns.x|replace('a', ns.x)"),
            ("replacing", "ns.x.replace('a', ns.x)"),
            ("format", "'{0}{0}'.format(ns.x)"),
            ("percent", "'%s%s' % (ns.x, ns.x)"),
            ("block", "'' %}{% set ns.x %}{{ ns.y }}{{ ns.y }}{% endset %}{% set ns.y = ns.x or 'a'"),
        )
    },
}
