"""Train the byte-level tokenizer and turn dialogues into token ids.

Digits are split singly, so that a sum is columns of digits and not a lookup of number words; every byte has a
token of its own, so that any text survives the round trip.
"""

import itertools
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from chatcache.builtin.dialogues import Dialogue, stream

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END)
VOCAB_SIZE = 1536
MAX_POSITIONS = 2048
IGNORED = -100

# each message is rendered on its own: the prompt of a longer history begins with that of a shorter one
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(dialogue: Dialogue) -> str:
    """Write a dialogue as the chat template does."""
    return "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in dialogue)


def train_tokenizer(seed: int, num_dialogues: int = 30_000) -> Tokenizer:
    """Learn the merges from generated dialogues."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (render(dialogue) for dialogue in itertools.islice(stream(seed), num_dialogues))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Write `tokenizer.json` and the configuration that `transformers.AutoTokenizer` expects beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Encoder:
    """Turn dialogues into inputs and targets; only what the assistant says is a target."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start_id, self.end_id = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
        self.header = tokenizer.encode(f"{START}assistant\n").ids

    def encode(self, dialogues: Sequence[Dialogue]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids [T] and targets [T] for each dialogue, cut at the context length."""
        encodings = self.tokenizer.encode_batch_fast([render(dialogue) for dialogue in dialogues])
        pairs = []
        for encoding in encodings:
            ids = np.asarray(encoding.ids[: MAX_POSITIONS + 1], dtype=np.int64)
            pairs.append((ids[:-1], np.where(self.spoken(ids), ids, IGNORED)[1:]))
        return pairs

    def spoken(self, ids: np.ndarray) -> np.ndarray:
        """Mark the tokens of the assistant's answers, their end token included: bool [T]."""
        spoken = np.zeros(len(ids), dtype=bool)
        starts = np.flatnonzero(ids == self.start_id)
        for begin, after in itertools.zip_longest(starts, starts[1:], fillvalue=len(ids)):
            if list(ids[begin : begin + len(self.header)]) == self.header:
                ends = np.flatnonzero(ids[begin:after] == self.end_id)
                stop = begin + ends[0] + 1 if len(ends) else after
                spoken[begin + len(self.header) : stop] = True
        return spoken
