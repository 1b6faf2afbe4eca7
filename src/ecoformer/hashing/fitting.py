"""Fitting every hasher of a model, each on the tokens that its layer receives."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_structure

from ecoformer.arguments import shape
from ecoformer.hashing.base import Hasher
from ecoformer.hashing.solver import FitOptions
from ecoformer.running import eval_mode

Forward = Callable[[nn.Module, Any], Any]
Group = dist.ProcessGroup | Literal["alone"] | None


def hashers_of(model: nn.Module) -> dict[str, Hasher]:
    """The hashers inside `model` by name, in the order of its modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Hasher)}


@contextlib.contextmanager
def fitting(
    model: nn.Module,
    *,
    seed: int = 0,
    options: FitOptions | None = None,
    group: Group = None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[list[str]]:
    """While the context is open, each hasher that the model reaches is fitted once, just before it hashes.

    One forward pass fits all layers in the order of the data, so later layers see earlier ones already
    fitted. Also works inside a training step. Yields the growing list of fitted names; `progress` is called
    with each of them.

    >>> with fitting(model):
    ...     model(images)
    """
    names, group = hashers_of(model), check_group(group)
    if not names:
        raise ValueError(f"{type(model).__name__} holds no hasher to fit: convert it or build it with one")
    done: list[str] = []

    def make_hook(name: str, layer_seed: int) -> Callable[..., None]:
        def hook(hasher: Hasher, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name in done:
                return
            if hasher.learns:
                tokens, mask = _forward_arguments(*args, **kwargs)
                try:
                    hasher.fit(tokens, key_padding_mask=mask, seed=layer_seed, options=options, group=group)
                except ValueError as error:
                    raise ValueError(f"{name or 'hasher'}: {error}") from error
            done.append(name)
            if progress is not None:
                progress(name)

        return hook

    hooks = [
        hasher.register_forward_pre_hook(make_hook(name, seed + index), with_kwargs=True)
        for index, (name, hasher) in enumerate(names.items())
    ]
    try:
        # A compiled model would not notice hooks added after its graph.
        with torch.compiler.set_stance("force_eager"):
            yield done
    finally:
        for hook in hooks:
            hook.remove()
    if not done:
        raise RuntimeError(f"no hasher of {type(model).__name__} was reached: run the model inside fitting()")


def fit_hashers(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    samples: int = 64,
    seed: int = 0,
    options: FitOptions | None = None,
    group: Group = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> list[str]:
    """Fit all hashers of `model` in one forward pass; returns their names in the order of the data.

    Either all hashers are fitted or, if there is an error, none is changed.

    Args:
        model: any module with hashers inside. It runs in eval mode without gradients; its mode is restored.
        batches: tensors, (inputs, ...) tuples or keyword mappings, such as a data loader yields. The first
            `samples` samples run together as one batch; mappings with an `attention_mask` are padded to one
            length, others must have the same size.
        samples: how many samples to learn from, on this rank.
        seed: the same seed and samples give the same hash functions, on any number of ranks.
        options: how to learn, see `FitOptions`.
        group: process group whose ranks each pass their own samples; all learn from all. Required with
            several ranks, which would otherwise learn different functions; "alone" allows that.
        forward: how to run a batch, `forward(model, batch)`; default: `model(inputs)` or `model(**mapping)`.
        progress: show a progress bar, on a terminal and on the first rank only.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    batch = _first_samples(batches, samples)
    tensor = next(chain(model.parameters(), model.buffers()), torch.empty(0))
    hashers = hashers_of(model)
    before = {hasher: copy.deepcopy(hasher.state_dict()) for hasher in hashers.values()}
    first_rank = not dist.is_initialized() or dist.get_rank() == 0
    try:
        with (
            eval_mode(model),
            torch.no_grad(),
            progress_bar(len(hashers), progress and first_rank) as advance,
            fitting(model, seed=seed, options=options, group=group, progress=advance) as done,
        ):
            (forward or run)(model, move(batch, tensor.device))
        missed = [name for name in hashers if name not in done]
        if missed:
            raise RuntimeError(f"the forward pass never reached these hashers: {', '.join(missed)}")
    except BaseException:
        for hasher, state in before.items():
            hasher.load_state_dict(state)
        raise
    return done


class RefitHashers:
    """Callback for training loops: fit at epoch 0 and again every tau epochs, as the paper does.

    Call it at the start of every epoch with batches to learn from; it returns whether it fitted. The seed
    depends on the epoch, so a resumed run fits as an uninterrupted one does.
    """

    def __init__(self, model: nn.Module, every: int, *, seed: int = 0, **fit_arguments: Any) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 epoch, got {every}")
        self.model, self.every, self.seed, self.fit_arguments = model, every, seed, fit_arguments

    def due(self, epoch: int) -> bool:
        """Whether to fit at the start of `epoch` (counted from 0)."""
        fitted = all(hasher.is_fitted for hasher in hashers_of(self.model).values())
        return not fitted or epoch % self.every == 0

    def __call__(self, epoch: int, batches: Iterable[Any]) -> bool:
        """Fit if `epoch` is due."""
        if not self.due(epoch):
            return False
        fit_hashers(self.model, batches, seed=self.seed + epoch, **self.fit_arguments)
        return True


def several_ranks() -> bool:
    """Whether there are other processes, which may learn the same."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_group(group: Group, *, default_all: bool = False) -> dist.ProcessGroup | None:
    """The ranks that learn together; None if this one learns alone.

    Where there are several, `group` must say so, unless `default_all` makes it all of them.
    """
    if isinstance(group, str) and group != "alone":
        raise ValueError(f'group must be a process group, None or "alone", got {group!r}')
    if group is None and several_ranks():
        if default_all:
            return dist.group.WORLD
        raise ValueError(
            f"group is None, but {dist.get_world_size()} ranks would learn different functions: pass "
            'group=dist.group.WORLD, or group="alone" if only this rank learns'
        )
    return None if isinstance(group, str) else group


def _forward_arguments(
    tokens: Tensor, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The arguments of `Hasher.forward`, by position or by name."""
    return tokens, key_padding_mask


def run(model: nn.Module, batch: Any) -> Any:
    """Run a batch as loaders yield it: `model(inputs)` or `model(**mapping)`."""
    if all(isinstance(x, (str, bytes, int, float, type(None))) for x in tree_leaves(_plain(batch))):
        raise TypeError(_no_tensor(batch))
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, Sequence) else batch)


def move(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`."""
    return tree_map_only(Tensor, lambda x: x.to(device), _plain(batch))


def _plain(batch: Any) -> Any:
    """Mappings of other libraries as dicts."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def check_batches(batches: Any) -> None:
    """Refuse a single batch where an iterable of batches is needed."""
    needed = "batches must be an iterable of batches, such as a list of tensors"
    if isinstance(batches, (Tensor, Mapping, str)):
        raise TypeError(f"{needed}, got one {type(batches).__name__}: put it in a list")
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise TypeError(f"{needed}, got {type(batches).__name__}")


def _first_samples(batches: Iterable[Any], samples: int) -> Any:
    """The first samples of the batches as one batch of the same structure."""
    check_batches(batches)
    taken: list[Any] = []
    count = 0
    for batch in batches:
        sizes = [len(x) for x in tree_leaves(_plain(batch)) if isinstance(x, Tensor) and x.ndim]
        if not sizes:
            raise TypeError(_no_tensor(batch))
        taken.append(_plain(batch))
        count += sizes[0]
        if count >= samples:
            break
    if not count:
        raise ValueError("batches is empty: there is nothing to learn from")
    kinds = [tree_structure(part, is_leaf=_is_strings) for part in taken]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            "batches must have the same structure to run together, such as the same keys: pass one batch"
        )
    return tree_map(lambda *parts: _join(parts, samples), *_pad_texts(taken), is_leaf=_is_strings)


def _no_tensor(batch: Any) -> str:
    got = "a 0-d tensor" if isinstance(batch, Tensor) else type(batch).__name__
    return f"batches: each must be a tensor, or a list, tuple or dict of tensors, got {got}"


def _is_strings(x: Any) -> bool:
    """Such as the names of a batch's files; the last batch has fewer."""
    return isinstance(x, (list, tuple)) and bool(x) and all(isinstance(each, str) for each in x)


def _join(parts: Sequence[Any], samples: int) -> Any:
    if _is_strings(parts[0]):
        return [x for part in parts for x in part][:samples]
    if not all(isinstance(x, Tensor) and x.ndim for x in parts):
        return parts[0]
    shapes = {x.shape[1:]: shape(x) for x in parts}
    if len(shapes) > 1:
        raise ValueError(
            "batches must agree beyond their first dimension to run together, got "
            f"{' and '.join(shapes.values())}: pad them to one size or pass one batch"
        )
    return torch.cat(list(parts))[:samples]


def _pad_texts(parts: list[Any]) -> list[Any]:
    """Batches of texts, each padded to its own longest, padded to one length; masks mark the padding."""
    masks = [part.get("attention_mask") if isinstance(part, dict) else None for part in parts]
    lengths = [mask.shape[1] for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]
    if len(lengths) < len(parts):
        return parts

    def pad(x: Any, length: int) -> Any:
        per_token = isinstance(x, Tensor) and x.ndim == 2 and x.shape[1] == length
        return nn.functional.pad(x, (0, max(lengths) - length)) if per_token else x

    return [{k: pad(x, n) for k, x in part.items()} for part, n in zip(parts, lengths, strict=True)]


@contextlib.contextmanager
def progress_bar(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal, or a line every few seconds in a pipe, on stderr; both estimate the time.

    The function advances it by one and sets its description.
    """
    if not show:
        yield lambda description: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console, done, start = Console(stderr=True), 0, time.monotonic()
    due = start + 1

    def advance(description: str) -> None:
        nonlocal done, due
        progress.update(task, advance=1, description=description)
        done += 1
        if not console.is_terminal and time.monotonic() >= due:
            left = (time.monotonic() - start) / done * (total - done)
            console.print(f"{done} of {total}, about {left:.0f} s left: {description}", soft_wrap=True)
            due = time.monotonic() + 5

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield advance
