"""Kinds of state that requests carry, one for each of vLLM's KV cache groups. Pure.

A kind says how tensor parallelism cuts the blocks of its group, which blocks of a request hold
something, and what a hit in the prefix cache needs. Schedulers, connector, moves and profiles ask
it, and know of no kind by name: a new one is a class here, in `KINDS`. vLLM's own managers allocate
the blocks; a switch checks them against this.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

from pat_vllm.layout import Layout

NULL_BLOCK = 0
"""Id of vLLM's null block, which stands where a request has no block any more."""


@dataclass(frozen=True)
class StateKind:
    """The state of a group of layers that share block tables.

    Attributes:
        heads: parts into which tensor parallelism can cut a block, such as KV heads.
        block_size: tokens of a block.
        token_bytes: of a token, over all layers of the group and all heads.
        dropped: blocks at the end of a hit that vLLM gives back: what a drafter has in the last one
            depends on the token behind it. They have to be cached all the same.
        drafts: blocks of a request behind those of its tokens, for the most drafts of a step.
    """

    heads: int
    block_size: int
    token_bytes: int = 0
    dropped: int = field(default=0, kw_only=True)
    drafts: int = field(default=0, kw_only=True)

    title: ClassVar[str]
    """Its name in error messages."""
    spec_name: ClassVar[str]
    """Class name of vLLM's `KVCacheSpec`s of this kind."""
    padded: ClassVar[bool] = False
    """Whether a block may take more bytes than it fills."""

    @classmethod
    def serves(cls, spec: Any) -> bool:
        """Whether a `KVCacheSpec` of vLLM's is of this kind, and layouts can share it."""
        return (
            type(spec).__name__ == cls.spec_name
            # A block is one run of bytes for each KV head.
            and spec.num_head_slots is None
            and spec.page_size_padded is None
        )

    @classmethod
    def heads_in(cls, spec: Any, num_kv_heads: int, tp: int) -> int:
        """`heads` of a spec of this kind; 1: every rank of a replica has the state whole.

        Args:
            num_kv_heads: that the model's config names.
            tp: of the layout whose spec it is.
        """
        return num_kv_heads

    @classmethod
    def of(cls, spec: Any, heads: int, layers: int, **more: int) -> StateKind:
        """The kind of `layers` layers with this spec, whose blocks can be cut into `heads`."""
        per_token = spec.page_size_bytes // spec.block_size * layers
        return cls(heads, spec.block_size, per_token * heads // spec.num_heads, **more)

    # ---------------------------------------------------------------- layouts

    def heads_of(self, layout: Layout, tp_rank: int) -> range:
        """The heads that a block has on a rank of a layout, in their order there."""
        return layout.kv_heads_of(tp_rank, self.heads)

    def ratio(self, layout: Layout, base: Layout) -> int:
        """How many blocks of `layout` take the bytes of one block of `base` on a rank."""
        return len(self.heads_of(base, 0)) // len(self.heads_of(layout, 0))

    def narrow(self, spec: Any, layout: Layout, ratio: int) -> Any:
        """The spec of a layout, `ratio` of whose blocks take the bytes of one of `spec`."""
        return replace(spec, num_kv_heads=len(self.heads_of(layout, 0)))

    @classmethod
    def segments(cls, spec: Any, view: Any) -> list[Any]:
        """The parts of a layer's blocks that are cut, each by itself.

        Args:
            view: vLLM's of the layer, a tensor [blocks, heads, tokens, content].

        Returns:
            Views of the same memory, [blocks, heads, rows, content]. Every part has the `heads`.
        """
        return [view]

    # ---------------------------------------------------------------- blocks of a request

    def skipped(self, tokens: int) -> int:
        """How many of a request's first computed tokens are not needed any more; see `held`."""
        return 0

    def held(self, tokens: int) -> range:
        """Places of the blocks that are not null, of a request with so many computed tokens.

        They end with the last token's.
        """
        return range(self.skipped(tokens) // self.block_size, -(-tokens // self.block_size))

    @property
    def block_bytes(self) -> int:
        """What a block holds, over all layers of the group and all heads."""
        return self.block_size * self.token_bytes

    def bytes_held(self, tokens: int) -> int:
        """What a request of so many computed tokens holds: all heads once."""
        return self.token_bytes * (tokens - self.held(tokens).start * self.block_size)

    def most_blocks(self, tokens: int, room: int) -> int:
        """The most blocks of a request on its way to so many tokens.

        Args:
            room: tokens by which it may grow before blocks that have become null are given back:
                those of the steps in flight, all of a prompt that is computed at once.
        """
        return -(-tokens // self.block_size)

    def needed(self, blocks: int) -> range:
        """Places of the blocks that a hit of so many needs, those `dropped` included."""
        rest = max(0, blocks - self.dropped)
        return range(self.held(rest * self.block_size).start, blocks)

    def longest_hit(self, most: int, is_cached: Callable[[int], bool]) -> int:
        """The longest prefix, of at most so many blocks, that the cache has.

        Args:
            is_cached: whether the cache has the block of a place.
        """
        blocks = most
        while blocks:
            needed = reversed(self.needed(blocks))
            # A longer prefix than up to this gap would need it, too.
            gap = next((place for place in needed if not is_cached(place)), None)
            if gap is None:
                return blocks
            blocks = gap
        return 0

    def missing(self, blocks: int, has: Callable[[int], bool]) -> Sequence[int]:
        """Places of blocks that a hit of so many blocks needs, without those that `has` names."""
        return [place for place in self.needed(blocks) if not has(place)]


@dataclass(frozen=True)
class FullAttention(StateKind):
    """Every block stays. Where one is cached, so are all before it.

    Layers with a window are of this kind, too, where vLLM keeps all their blocks.
    """

    title = "full attention"
    spec_name = "FullAttentionSpec"

    def longest_hit(self, most: int, is_cached: Callable[[int], bool]) -> int:
        if not most or not is_cached(0):
            return 0
        return bisect_left(range(most), True, key=lambda place: not is_cached(place))

    def missing(self, blocks: int, has: Callable[[int], bool]) -> Sequence[int]:
        return range(bisect_left(range(blocks), True, key=lambda place: not has(place)), blocks)


@dataclass(frozen=True)
class LatentAttention(FullAttention):
    """What a token leaves is a latent vector of which all heads make their keys and values.

    A rank needs it whole whatever its heads are. So a block is as large in every layout, and the
    ranks of a replica hold the same ones: what a replica can hold does not grow with tp.
    Sparse attention, whose indexers have caches of their own, is refused by the model.
    """

    title = "latent attention"
    spec_name = "MLAAttentionSpec"

    @classmethod
    def heads_in(cls, spec: Any, num_kv_heads: int, tp: int) -> int:
        return 1


@dataclass(frozen=True)
class SlidingWindow(StateKind):
    """A token attends to those of its window, itself included. Blocks before it are null.

    Attributes:
        window: tokens.
    """

    window: int = 1

    title = "sliding windows"
    spec_name = "SlidingWindowSpec"

    @classmethod
    def serves(cls, spec: Any) -> bool:
        return super().serves(spec) and not spec.extra_retained_tokens

    @classmethod
    def of(cls, spec: Any, heads: int, layers: int, **more: int) -> StateKind:
        return super().of(spec, heads, layers, window=spec.sliding_window, **more)

    def skipped(self, tokens: int) -> int:
        # As `SlidingWindowManager.get_num_skipped_tokens`, of the window of the next token.
        return max(0, tokens - self.window + 1)

    def most_blocks(self, tokens: int, room: int) -> int:
        # As `SlidingWindowSpec.max_admission_blocks_per_request`.
        most = -(-(self.window - 1 + room) // self.block_size) + 1
        return min(super().most_blocks(tokens, room), most)


@dataclass(frozen=True)
class ChunkedAttention(StateKind):
    """A token attends to those of its chunk up to itself. Blocks of earlier chunks are null.

    Attributes:
        chunk: tokens.
    """

    chunk: int = 1

    title = "chunked attention"
    spec_name = "ChunkedLocalAttentionSpec"

    @classmethod
    def of(cls, spec: Any, heads: int, layers: int, **more: int) -> StateKind:
        return super().of(spec, heads, layers, chunk=spec.attention_chunk_size, **more)

    def skipped(self, tokens: int) -> int:
        # As `ChunkedLocalAttentionManager.get_num_skipped_tokens`, of the chunk of the next token.
        return tokens // self.chunk * self.chunk


@dataclass(frozen=True)
class LinearAttention(StateKind):
    """A request has one state, of its last token: a slot, whatever the number of its tokens.

    A head is a key head with the value heads that read it; in Mamba2 a group with its heads, whose
    B, C and x are keys, queries and values. In a slot a head has several segments: in each row of
    the convolution its queries, keys and values, and then its matrices.
    With prefix caching vLLM keeps a state for each block of tokens, too, where a prompt's part
    ended there: they are blocks of which a request needs the last one. Without, a block is as long
    as the longest context.

    A step that verifies drafts has a slot for each of its tokens, the last computed one's first.
    Before a switch the runner puts the state there (`worker/linear_states.py`): that slot alone
    moves. A drafter has no such state, so a hit that it shortens needs the state at its new end.

    Attributes:
        slot_bytes: of a request's state, over all layers of the group and all heads.
    """

    slot_bytes: int = 0

    title = "linear attention (Gated DeltaNet, Mamba2)"
    spec_name = "MambaSpec"
    padded = True

    @classmethod
    def serves(cls, spec: Any) -> bool:
        return (
            type(spec).__name__ == cls.spec_name
            and spec.mamba_type.name in _ROWS
            and spec.mamba_cache_mode in ("none", "align")
            and len(spec.shapes) == 2
            and not spec.tp_replicated
            and not spec.num_prefill_checkpoint_blocks
            and not any(width % _WORD for _, _, widths in _parts_of_slot(spec) for width in widths)
        )

    @classmethod
    def heads_in(cls, spec: Any, num_kv_heads: int, tp: int) -> int:
        return tp * _key_heads(spec)

    @classmethod
    def of(cls, spec: Any, heads: int, layers: int, **more: int) -> StateKind:
        slot = spec.state_content_size_bytes * layers * heads // _key_heads(spec)
        drafts = spec.num_speculative_blocks
        return cls(heads, spec.block_size, slot_bytes=slot, drafts=drafts, **more)

    def heads_of(self, layout: Layout, tp_rank: int) -> range:
        if self.heads % layout.tp:
            raise ValueError(
                f"{self.heads} key heads of linear attention cannot be split over tp={layout.tp}"
            )
        return super().heads_of(layout, tp_rank)

    def narrow(self, spec: Any, layout: Layout, ratio: int) -> Any:
        own, base = len(self.heads_of(layout, 0)), _key_heads(spec)
        (rows, row), (values, *matrix) = spec.shapes
        shapes = (rows, row * own // base), (values * own // base, *matrix)
        page, fills = spec.page_size_bytes // ratio, spec.state_content_size_bytes * own // base
        return replace(spec, shapes=shapes, page_size_padded=None if page == fills else page)

    @classmethod
    def segments(cls, spec: Any, view: Any) -> list[Any]:
        heads, page, segments = _key_heads(spec), view.stride(0), []
        for start, rows, widths in _parts_of_slot(spec):
            for i, width in enumerate(widths):
                row = heads * sum(widths) if rows > 1 else width  # one row is one run of bytes
                at = view.storage_offset() + start + heads * sum(widths[:i])
                shape, strides = (view.shape[0], heads, rows, width), (page, width, row, 1)
                segments.append(view.as_strided(shape, strides, at))
        return segments

    def held(self, tokens: int) -> range:
        blocks = -(-tokens // self.block_size)
        return range(max(0, blocks - 1), blocks)

    @property
    def block_bytes(self) -> int:
        return self.slot_bytes

    def bytes_held(self, tokens: int) -> int:
        return self.slot_bytes if tokens else 0

    def most_blocks(self, tokens: int, room: int) -> int:
        # The last state is there until the next one is. A step of many tokens needs no others,
        # though PAT's own requests for measurements have them.
        most = min(super().most_blocks(tokens, room), -(-room // self.block_size) + 1)
        return most + self.drafts

    def needed(self, blocks: int) -> range:
        return self.held(max(0, blocks - self.dropped) * self.block_size)

    def longest_hit(self, most: int, is_cached: Callable[[int], bool]) -> int:
        lengths = range(most, 0, -1)
        return next((n for n in lengths if all(map(is_cached, self.needed(n)))), 0)


_WORD = 8
"""Bytes that a move copies at once."""
_ROWS = {"GDN_ATTN": ("key", "key", "value"), "MAMBA2": ("value", "key", "key")}
"""What a row of the convolution's state has, one after the other, by vLLM's name of the kind:
queries, keys and values; x, B and C."""


def _key_heads(spec: Any) -> int:
    """Those of a `MambaSpec`, on its rank."""
    (_, row), (values, value, key) = spec.shapes
    return int((row - values * value) // (2 * key))


def _parts_of_slot(spec: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    """What a slot consists of: where it begins, its rows, and a head's width in each part of a row.

    In bytes. The convolution's state is [rows, all of `_ROWS`], the matrices' is
    [value heads, value, key].
    """
    (rows, row), (values, value, key) = spec.shapes
    of_conv, of_matrix = (dtype.itemsize for dtype in spec.dtypes)
    each = values // _key_heads(spec)
    width_of = {"key": key * of_conv, "value": each * value * of_conv}
    return [
        (0, rows, tuple(width_of[part] for part in _ROWS[spec.mamba_type.name])),
        (rows * row * of_conv, 1, (each * value * key * of_matrix,)),
    ]


KINDS: list[type[StateKind]] = [
    *(FullAttention, LatentAttention, SlidingWindow, ChunkedAttention, LinearAttention)
]
"""All classes of kinds that are served."""

Kinds: TypeAlias = Sequence[StateKind]
"""The kinds of an engine, one for each of vLLM's KV cache groups, in their order."""


def class_of(spec: Any) -> type[StateKind] | None:
    """The class of kinds that serves one of vLLM's specs; None: layouts cannot share it."""
    return next((kind for kind in KINDS if kind.serves(spec)), None)


def served() -> str:
    """What is served, for errors."""
    return " and ".join(kind.title for kind in KINDS)


# -------------------------------------------------------------------- all kinds of an engine


def num_blocks(kinds: Kinds, tokens: int, room: int) -> int:
    """The most blocks of a request on its way to so many tokens; see `StateKind.most_blocks`."""
    return sum(kind.most_blocks(tokens, room) for kind in kinds)


def longest_context(kinds: Kinds, blocks: int, most: int, room: int) -> int:
    """The most tokens of a request, up to `most`, for which so many blocks are always enough."""
    return bisect_right(range(1, most + 1), blocks, key=lambda n: num_blocks(kinds, n, room))


def longest_hit(kinds: Kinds, most: int, is_cached: Callable[[int, int], bool]) -> int:
    """The longest prefix, of at most so many blocks, that the caches of all groups have.

    As vLLM's `find_longest_cache_hit`, with the blocks that it drops.

    Args:
        is_cached: whether the cache of a group has the block of a place.
    """
    blocks, agree, group = most, 0, 0
    while blocks and agree < len(kinds):
        hit = kinds[group].longest_hit(blocks, partial(is_cached, group))
        agree = agree + 1 if hit == blocks else 1
        blocks, group = hit, (group + 1) % len(kinds)
    return blocks


def fewest_heads(specs: Iterable[Any], num_kv_heads: int, tp: int) -> int:
    """The fewest `heads` of any of these specs; see `StateKind.heads_in`."""
    heads = [kind.heads_in(spec, num_kv_heads, tp) for spec in specs if (kind := class_of(spec))]
    return min(heads, default=num_kv_heads)


def block_size(kinds: Kinds) -> int:
    """Tokens of a block, in all groups whose blocks can be cached."""
    return min(kind.block_size for kind in kinds)


def densest(kinds: Kinds) -> int:
    """Index of the group that keeps most blocks of a request."""
    return max(range(len(kinds)), key=lambda group: len(kinds[group].held(1 << 24)))


def carried_tokens(kinds: Kinds, tokens: int) -> float:
    """What moves with a request, as a number of tokens whose state is whole."""
    whole = sum(kind.token_bytes for kind in kinds)
    return sum(kind.bytes_held(tokens) for kind in kinds) / whole if whole else tokens
