"""Published: reading a model's published configuration key by key, and the rules that its lists of layers follow.

A configuration remembers what was read of it, so that a key that nothing knows is refused, and what a Model cannot say
of the network (`Departure`). `spec.huggingface` knows the architectures.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from greylag.spec.error import SpecError

MOST_LAYERS = 10_000
"""No network has more; a number beyond it is a mistake that would take for ever."""


class Departure(NamedTuple):
    """What a network has and a Model cannot say."""

    key: str
    """Of config.json, or the module that the architecture always has."""
    what: str
    """What it is, and what stands in its place."""
    parameters: int = 0
    """Weights that the Model therefore lacks."""


class Config:
    """A config.json: typed reading that remembers what was read, and the departures found."""

    def __init__(self, table: dict[str, Any], where: str) -> None:
        self.table, self.where = table, where
        self.read: set[str] = set()
        self.departures: list[Departure] = []

    def value(self, key: str, kind: str, default: Any = None) -> Any:
        """The value of a key, `default` where it is absent or null; without default it is required."""
        self.read.add(key)
        value = self.table.get(key)
        if value is None:
            if default is None:
                raise SpecError(f"{self.where}: '{key}' is missing; add it")
            return default
        fits = {
            "integer": isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63,
            "number": isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300,
            "true or false": isinstance(value, bool),
            "string": isinstance(value, str),
            "list": isinstance(value, list),
        }
        if not fits[kind]:
            raise SpecError(f"{self.where}: '{key}' must be of type {kind}, is {value!r}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A count."""
        value: int = self.value(key, "integer", default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A real number."""
        return float(self.value(key, "number", default))

    def flag(self, key: str, default: bool = False) -> bool:
        """A switch."""
        value: bool = self.value(key, "true or false", default)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A name."""
        value: str = self.value(key, "string", default)
        return value

    def items(self, key: str) -> list[Any]:
        """A list, empty where it is absent."""
        value: list[Any] = self.value(key, "list", [])
        return value

    def depart(self, key: str, what: str, parameters: int = 0) -> None:
        """Note what a Model cannot say."""
        self.departures.append(Departure(key, what, parameters))

    def refuse_unread(self) -> None:
        """Refuse keys that are set and that nothing here knows."""
        for key, value in self.table.items():
            known = key in self.read or key in _WITHOUT_EFFECT or key.startswith("_")
            if not known and value not in (None, False, 0, "", [], {}):
                raise SpecError(
                    f"{self.where}: unknown key {key!r}: it may change the model; remove it if it changes no shape"
                )


_NO_SHAPE = """
architectures auto_map attn_implementation bos_token_id chunk_size_feed_forward decoder_start_token_id dtype
eos_token_id forced_bos_token_id forced_eos_token_id id2label initial_context_length is_decoder keys_to_ignore
label2id language_model_only max_length min_length model_type n_ctx name_or_path num_beams output_attentions
output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type quantization_config
repetition_penalty return_dict sep_token_id task_specific_params temperature tokenizer_class top_k top_p
torch_dtype transformers_version unsloth_fixed unsloth_version use_cache use_bfloat16 unk_token_id
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
"""
"""Keys of the file, the tokenizer, generation, the checkpoint and the attention kernel."""
_TRAINING = """
attention_dropout attn_pdrop aux_loss_alpha embd_pdrop ep_size hidden_dropout resid_pdrop router_aux_loss_coef
router_jitter_noise seq_aux original_max_position_embeddings rope_interleave rope_scaling scale_attn_weights
qk_head_dim
"""
"""Keys of dropout, routing losses and reference code; of positions beyond the context of pre-training and the order of
rotary pairs; and a width of which others are the parts."""
_WITHOUT_EFFECT = frozenset((_NO_SHAPE + _TRAINING).split())


def every_nth(chosen: Sequence[bool]) -> tuple[int, int] | None:
    """(first, n) such that of the layers from `first` the last of each n is chosen, and no other; None if none does."""
    places = [i for i, is_chosen in enumerate(chosen) if is_chosen]
    if not places:
        return None
    n = places[1] - places[0] if len(places) > 1 else places[0] + 1
    first = places[0] - n + 1
    return (first, n) if first >= 0 and places == list(range(places[0], len(chosen), n)) else None


def expert_layers(chosen: Sequence[bool], where: str) -> dict[str, int]:
    """`num_dense_layers` and `every` of the layers that have experts. Raises SpecError if no such rule gives them."""
    rule = every_nth(chosen)
    if rule is None:
        raise SpecError(f"{where}: the layers with experts follow no rule of num_dense_layers and every")
    return {"num_dense_layers": rule[0], "every": rule[1]}


def shared_experts(shared: int, width: int) -> dict[str, int]:
    """`num_shared_experts` of so much width together, and that width where it is no multiple of an expert's `width`."""
    width = max(width, 1)
    return {"num_shared_experts": -(-shared // width), **({"shared_width": shared} if shared % width else {})}


def windows(window: int | None, windowed: Sequence[bool]) -> dict[str, int] | None:
    """`window` and `full_attention_every` of the layers that have a window; None if no such rule gives them."""
    if not window or not any(windowed):
        return {}
    if all(windowed):
        return {"window": window}
    rule = every_nth([not is_windowed for is_windowed in windowed])
    return {"window": window, "full_attention_every": rule[1]} if rule and rule[0] == 0 else None
