"""Model configurations: what a network needs to know, read from and written to `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from race_jax.models.rope import RopeConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """What tells one model family from another.

    Attributes:
        architecture: The class name that transformers writes into `architectures`.
        qkv_bias: Whether query, key and value carry biases; None when `attention_bias` decides,
            which then holds for the output projection too.
        qk_norm: Whether queries and keys pass an RMS norm of their own before the rotation.
        head_dim: Head width when `config.json` names none; None for hidden_size / heads.
        experts: Whether each block's MLP is a mixture of experts.
        hybrid: Whether most blocks hold a gated DeltaNet in place of attention, and attention has
            an output gate.
        partial_rotary: Share of a head that is rotated when `config.json` names none; None where
            only whole heads are.
    """

    architecture: str
    qkv_bias: bool | None
    qk_norm: bool
    head_dim: int | None
    experts: bool = False
    hybrid: bool = False
    partial_rotary: float | None = None


FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, qk_norm=False, head_dim=None),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=None, qk_norm=True, head_dim=128),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qkv_bias=None, qk_norm=True, head_dim=None, experts=True
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        qkv_bias=None,
        qk_norm=True,
        head_dim=256,
        hybrid=True,
        partial_rotary=0.25,
    ),
}
"""The families that can be loaded, by the `model_type` of `config.json`."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
_EXPERT_SIZES = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
"""Sizes of a mixture of experts, and what transformers takes where `config.json` names none."""
_HYBRID_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Sizes of gated DeltaNet, and what transformers takes where `config.json` names none."""
_WRAPPERS = {"qwen3_5": "qwen3_5_text"}
"""Multimodal model types, and the type of the language model in their `text_config`."""
LAYER_TYPES = ("linear_attention", "full_attention")
"""Kinds of blocks of a hybrid: gated DeltaNet, and attention."""
_NUMBER, _FLAG = (int, float), (bool,)
_KINDS: Mapping[str, tuple[type, ...]] = {
    "model_type": (str,),
    "rms_norm_eps": _NUMBER,
    "initializer_range": _NUMBER,
    "tie_word_embeddings": _FLAG,
    "attention_bias": _FLAG,
    "rope_theta": _NUMBER,
    "rope_scaling": (dict,),
    "rope_parameters": (dict,),
    "original_max_position_embeddings": _NUMBER,
    "use_sliding_window": _FLAG,
    "max_window_layers": _NUMBER,
    "layer_types": (list,),
    "norm_topk_prob": _FLAG,
    "mlp_only_layers": (list,),
    "text_config": (dict,),
    "full_attention_interval": _NUMBER,
    "partial_rotary_factor": _NUMBER,
    "attn_output_gate": _FLAG,
}
_ROTARY_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings"), _NUMBER),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), _NUMBER),
    **dict.fromkeys(("beta_fast", "beta_slow", "partial_rotary_factor"), _NUMBER),
    **dict.fromkeys(("rope_type", "type"), (str,)),
    "truncate": _FLAG,
}
"""What kind of JSON value each key takes, where a wrong one would go unseen or break later."""
_SLIDING_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. The names are those of a Hugging Face `config.json`.

    Attributes:
        model_type: A key of `FAMILIES`; `qwen3_5_text` also for the language model of a multimodal
            `qwen3_5`.
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width D of the residual stream.
        intermediate_size: Width F of the gated MLP.
        num_hidden_layers: Blocks L.
        num_attention_heads: Query heads N.
        num_key_value_heads: Key and value heads K; divides N. 0 for as many as query heads.
        head_dim: Width H of a head, even; 0 for hidden_size / heads.
        rms_norm_eps: Added to the mean square inside every RMS norm.
        tie_word_embeddings: Whether the head is the embedding.
        max_position_embeddings: The context length that the checkpoint states, in tokens.
        attention_bias: Whether the four attention projections carry biases (not qwen2).
        initializer_range: Standard deviation of freshly drawn matrices.
        rope: The rotary position embedding.
        num_experts: Experts E in each block (qwen3_moe only; 0 for a dense MLP).
        num_experts_per_tok: Experts that each token passes, at most E.
        moe_intermediate_size: Width F of one expert.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to 1.
        layer_types: For each block `linear_attention` or `full_attention` (qwen3_5_text only); by
            default every fourth has attention.
        linear_num_key_heads: Query and key heads of gated DeltaNet.
        linear_num_value_heads: Its value heads, each with a state; a multiple of the key heads.
        linear_key_head_dim: Width of its queries and keys.
        linear_value_head_dim: Width of its values.
        linear_conv_kernel_dim: Inputs that its convolution sees, at least 2.
        extra: The other keys of `config.json`, written back as they came; they change no result.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    initializer_range: float = 0.02
    rope: RopeConfig = RopeConfig()  # noqa: RUF009 - frozen, so one default serves all
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if self.model_type not in FAMILIES:
            raise ValueError(
                f"model_type is {self.model_type!r}; the supported ones are "
                f"{', '.join(FAMILIES)}. Convert the checkpoint or choose another model."
            )
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim and self.num_attention_heads:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for name in _SIZES:
            _check_size(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads is "
                f"{self.num_key_value_heads}; the second must divide the first."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; it must be even, since the rotary embedding turns "
                "pairs of entries."
            )
        if not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}; it must be above 0.")
        _check_rotary(self)
        _check_experts(self)
        _check_hybrid(self)

    @property
    def family(self) -> Family:
        """The entry of `FAMILIES` for this model type."""
        return FAMILIES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections carry biases."""
        fixed = self.family.qkv_bias
        return self.attention_bias if fixed is None else fixed

    @property
    def out_bias(self) -> bool:
        """Whether the attention output projection carries a bias."""
        return self.attention_bias and self.family.qkv_bias is None

    @property
    def context_length(self) -> int:
        """The most tokens in one sequence: YaRN may stretch what `config.json` states."""
        return max(self.max_position_embeddings, self.rope.stretched_context)

    @property
    def period(self) -> int:
        """The length of the shortest run of blocks whose repetition makes up the network."""
        total, types = self.num_hidden_layers, self.layer_types
        if not types:
            return 1
        runs = (n for n in range(1, total + 1) if total % n == 0)
        return next(n for n in runs if types == types[:n] * (total // n))

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Numbers of the blocks of that kind, which is one of `LAYER_TYPES`."""
        return tuple(i for i, name in enumerate(self.layer_types) if name == kind)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Read the mapping of a `config.json`, as transformers 4 or 5 writes it.

        Args:
            data: The parsed file.

        Returns:
            The configuration. A missing key takes the value that transformers gives it, but
            `num_key_value_heads` falls back to `num_attention_heads`.

        Raises:
            ValueError: If a needed key is missing, or the file asks for something that is not
                implemented here: another architecture, quantised weights, sliding windows, another
                activation, another kind of rotary embedding.
        """
        _check_kinds(data, _KINDS)
        if data.get("model_type") in _WRAPPERS:
            return cls.from_hf(_unwrap(data))
        for key in ("rope_scaling", "rope_parameters"):
            _check_kinds(data.get(key) or {}, _ROTARY_KINDS, f"{key}.")
        model_type = data.get("model_type")
        if model_type not in FAMILIES:
            raise ValueError(
                f"config.json has model_type {model_type!r}; the supported ones are "
                f"{', '.join((*FAMILIES, *_WRAPPERS))}. Convert the checkpoint or choose another "
                "model."
            )
        _refuse_unsupported(data)
        family = FAMILIES[model_type]
        fields = {field.name for field in dataclasses.fields(cls)} - {"rope", "extra"}
        if not family.hybrid:
            fields -= {"layer_types", *_HYBRID_SIZES}
        known = {k: v for k, v in data.items() if k in fields and v is not None}
        missing = [k for k in (*_SIZES[:5], "model_type") if k not in known]
        if missing:
            raise ValueError(
                f"config.json lacks {', '.join(missing)}; a {model_type} model needs them. Copy "
                "the config.json that belongs to the checkpoint."
            )
        if "head_dim" not in data and family.head_dim:
            known["head_dim"] = family.head_dim
        if family.experts:
            known |= _read_experts(data)
        skip = fields | set(_ROPE_KEYS) | {"architectures", "num_local_experts"}
        if family.hybrid:
            known |= _read_hybrid(data)
            skip |= {"full_attention_interval", "partial_rotary_factor"}
        positions = known.get("max_position_embeddings", 32768)
        return cls(
            **known,
            rope=RopeConfig.from_hf(data, positions, family.partial_rotary),
            extra={k: v for k, v in data.items() if k not in skip},
        )

    def to_hf(self) -> dict[str, Any]:
        """The mapping for a `config.json` that `from_hf` and transformers (4 and 5) read."""
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("rope", "extra")
        }
        if self.family.qkv_bias is not None:
            del own["attention_bias"]
        if not self.family.experts:
            for name in (*_EXPERT_SIZES, "norm_topk_prob"):
                del own[name]
        if not self.family.hybrid:
            for name in ("layer_types", *_HYBRID_SIZES):
                del own[name]
        head = {"architectures": [self.family.architecture], "hidden_act": "silu"}
        return {**head, **self.extra, **own, **self.rope.to_hf()}


def _check_experts(config: ModelConfig) -> None:
    """Raise unless the sizes of the experts fit the family and one another."""
    sizes = {name: getattr(config, name) for name in _EXPERT_SIZES}
    if not config.family.experts:
        given = [name for name, value in sizes.items() if value]
        if given:
            raise ValueError(
                f"{given[0]} is {sizes[given[0]]!r}, and a {config.model_type} model has no "
                "experts; leave it out, or choose qwen3_moe."
            )
        return
    for name, value in sizes.items():
        _check_size(name, value)
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"num_experts_per_tok is {config.num_experts_per_tok} and num_experts is "
            f"{config.num_experts}; a token cannot pass more experts than there are."
        )


def _read_experts(data: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a mixture of experts, under the name of the hub or of newer transformers."""
    sizes = {name: data.get(name, default) for name, default in _EXPERT_SIZES.items()}
    sizes["num_experts"] = data.get("num_experts", data.get("num_local_experts", 128))
    step, dense = data.get("decoder_sparse_step", 1), data.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise ValueError(
            f"config.json has decoder_sparse_step {step!r} and mlp_only_layers {dense!r}; "
            "supported are 1 and [], so that every block has experts. Choose another model."
        )
    return sizes


def _check_rotary(config: ModelConfig) -> None:
    """Raise unless the rotated part of a head is made of pairs."""
    share = config.rope.partial_rotary_factor
    if share != 1 and config.family.partial_rotary is None:
        raise ValueError(
            f"partial_rotary_factor is {share}, and a {config.model_type} model rotates whole "
            "heads; set it to 1."
        )
    width = config.rope.rotary_width(config.head_dim)
    if width < 2 or width % 2:
        raise ValueError(
            f"head_dim is {config.head_dim} and partial_rotary_factor is {share}, so {width} "
            "entries would be rotated; that must be an even number above 0."
        )


def _check_hybrid(config: ModelConfig) -> None:
    """Raise unless the kinds of blocks and the sizes of gated DeltaNet fit one another."""
    sizes = {name: getattr(config, name) for name in _HYBRID_SIZES}
    if not config.family.hybrid:
        given = {k: v for k, v in (*sizes.items(), ("layer_types", config.layer_types)) if v}
        for name, value in given.items():
            raise ValueError(
                f"{name} is {value!r}, and a {config.model_type} model has attention in every "
                "block; leave it out, or choose qwen3_5_text."
            )
        return
    for name, value in sizes.items():
        _check_size(name, value)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise ValueError(
            f"linear_num_value_heads is {values} and linear_num_key_heads is {keys}; the second "
            "must divide the first."
        )
    if config.linear_conv_kernel_dim < 2:
        raise ValueError("linear_conv_kernel_dim is 1; the convolution needs at least 2 inputs.")
    count, types = config.num_hidden_layers, config.layer_types
    if not types:
        kinds = (LAYER_TYPES[(i + 1) % 4 == 0] for i in range(count))
        object.__setattr__(config, "layer_types", tuple(kinds))
        return
    if len(types) != count:
        raise ValueError(
            f"layer_types names {len(types)} blocks and num_hidden_layers is {count}; they must "
            "agree."
        )
    for layer, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            raise ValueError(
                f"layer_types has {kind!r} for block {layer}; the supported kinds are "
                f"{', '.join(LAYER_TYPES)}. Choose another model."
            )


def _read_hybrid(data: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of blocks and the sizes of gated DeltaNet, with transformers' defaults."""
    if data.get("attn_output_gate") is False:
        raise ValueError(
            "config.json has attn_output_gate false; supported: true. Choose another model."
        )
    own = {name: data.get(name, default) for name, default in _HYBRID_SIZES.items()}
    types = data.get("layer_types")
    if types is None:
        count: Any = data.get("num_hidden_layers")
        interval = data.get("full_attention_interval", 4)
        _check_size("num_hidden_layers", count)
        _check_size("full_attention_interval", interval)
        types = [LAYER_TYPES[(i + 1) % interval == 0] for i in range(count)]
    return {**own, "layer_types": tuple(types)}


def _unwrap(data: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model in a multimodal one; the other parts are left out."""
    _refuse_unsupported(data)
    text = data.get("text_config")
    wanted = _WRAPPERS[data["model_type"]]
    if not text:
        raise ValueError(
            f"config.json has model_type {data['model_type']!r} and no text_config; copy the "
            f"config.json that belongs to the checkpoint, or set model_type to {wanted!r} if it "
            "describes a language model alone."
        )
    found = text.get("model_type", wanted)
    if found != wanted:
        raise ValueError(
            f"config.json has text_config.model_type {found!r}; a {data['model_type']} model has "
            f"{wanted!r} there. Copy the config.json that belongs to the checkpoint."
        )
    # The head belongs to the whole model, so its own word on the head comes first.
    tied = data.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "model_type": wanted, "tie_word_embeddings": tied}


def _check_size(name: str, value: Any) -> None:
    """Raise unless `value` is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number above 0.")


def _check_kinds(
    data: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], where: str = ""
) -> None:
    """Raise unless each key that is there and not null has a value of its kind."""
    for key, kind in kinds.items():
        value = data.get(key)
        # A bool is an int to Python, and no number to JSON.
        fits = isinstance(value, kind) and isinstance(value, bool) == (bool in kind)
        if value is None or fits:
            continue
        words = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
        raise ValueError(
            f"config.json has {where}{key} {value!r}; it must be {words.get(kind[0], 'a number')}. "
            "Copy the config.json that belongs to the checkpoint."
        )


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Raise for a setting whose effect on the network is not implemented."""
    for key, allowed in (
        ("hidden_act", ("silu",)),
        ("quantization_config", ()),
        ("attention_dropout", (0,)),
    ):
        value = data.get(key)
        if value is not None and value not in allowed:
            listed = ", ".join(map(repr, allowed)) or "none"
            raise ValueError(
                f"config.json has {key} {value!r}; supported: {listed}. Convert the checkpoint or "
                "choose another model."
            )
    if data.get("use_sliding_window") and data.get("sliding_window") is not None:
        layers: Any = data.get("num_hidden_layers")
        _check_size("num_hidden_layers", layers)
        first = data.get("max_window_layers", 28)
        kinds = data.get("layer_types") or [
            "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
        ]
        if "sliding_attention" in kinds:
            raise ValueError(
                f"config.json has use_sliding_window true with sliding_window "
                f"{data['sliding_window']!r} on {kinds.count('sliding_attention')} layers; "
                "supported attention: full. Set use_sliding_window to false, which changes the "
                "model beyond that window, or choose another model."
            )
