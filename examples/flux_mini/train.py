"""Train flux-mini: a FLUX pipeline of some twelve million weights that draws 64-pixel emoji.

At the root of the checkout, on a GPU: `python -m examples.flux_mini.train <pictures>.npz <folder>`
(the file that `pictures.py` writes). Two phases, as for the large models: the autoencoder, then
text encoders and denoiser together on its cached posteriors. README.md is the model card.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from examples.flux_mini.autoencoder import Cache, build_cache, psnr, train_autoencoder, update
from examples.flux_mini.data import NUM_HELD_OUT, Data, load, phrases
from examples.flux_mini.text import TEXT_TOKENS, Text, conditioning, make_text
from lib import ema, pictures
from lib.device import pick_device, without_cudnn_attention
from lib.families import flux
from lib.noise import FLOW
from lib.sampling import euler

DENOISER = {
    "in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 32,
    "num_attention_heads": 8,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 128,
    "guidance_embeds": False,
    "axes_dims_rope": [8, 12, 12],
}


@dataclass(frozen=True)
class Recipe:
    """How long and how hard each phase trains."""

    autoencoder_steps: int = 3200
    autoencoder_batch: int = 128
    steps: int = 5000
    batch: int = 256
    rate: float = 1e-3
    caption_dropout: float = 0.1
    ema_decay: float = 0.999
    seed: int = 0


def batch_loss(
    denoiser: Any,
    text: Text,
    cache: Cache,
    chosen: torch.Tensor,
    *,
    dropout: float,
    draws: torch.Generator,
) -> torch.Tensor:
    """The flow loss of some pictures, each in a variant, phrase, noise and level of its own."""
    device, count = chosen.device, len(chosen)

    def below(limit: int) -> torch.Tensor:
        return torch.randint(limit, (count,), device=device, generator=draws)

    variant = below(len(cache.mean))
    mean, std = cache.mean[variant, chosen], cache.std[variant, chosen]
    raw = mean + std * torch.randn(mean.shape, device=device, generator=draws)
    latents = flux.normalise(raw, cache.constants)
    noise = torch.randn(mean.shape, device=device, generator=draws)
    level = torch.sigmoid(torch.randn(count, device=device, generator=draws))
    phrase = below(text.t5_ids.shape[1])
    dropped = torch.rand(count, 1, device=device, generator=draws) < dropout
    clip_ids = torch.where(dropped, text.empty[0], text.clip_ids[chosen, phrase])
    t5_ids = torch.where(dropped, text.empty[1], text.t5_ids[chosen, phrase])
    with torch.autocast(device.type, torch.bfloat16):
        prediction = flux.predict(
            denoiser,
            FLOW.add_noise(latents, noise, level),
            level,
            conditioning=conditioning(text.encoders, clip_ids, t5_ids),
            guidance=1.0,
        )
    return functional.mse_loss(prediction.float(), FLOW.target(latents, noise, level))


def train_denoiser(data: Data, text: Text, cache: Cache, recipe: Recipe) -> Any:
    """Denoiser and text encoders together; their moving averages are what is kept."""
    from diffusers import FluxTransformer2DModel

    device = data.pixels.device
    denoiser: Any = FluxTransformer2DModel(**DENOISER).to(device)
    modules = (denoiser, text.encoders.clip, text.encoders.t5)
    parameters = {f"{n} {k}": p for n, m in enumerate(modules) for k, p in m.named_parameters()}
    average = ema.start(parameters)
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    if device.type == "cuda":
        denoiser.compile()
    draws, started = torch.Generator(device).manual_seed(recipe.seed), time.time()
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = recipe.rate * _ramp(step, recipe.steps)
        place = torch.randint(len(data.train), (recipe.batch,), device=device, generator=draws)
        loss = batch_loss(
            denoiser,
            text,
            cache,
            data.train[place],
            dropout=recipe.caption_dropout,
            draws=draws,
        )
        update(loss, list(parameters.values()), optimizer)
        kept = ema.decay_at(step + 1, decay=recipe.ema_decay)
        weight = torch.tensor(1.0 - kept, device=device)
        ema.move(list(average.values()), list(parameters.values()), weight=weight)
        if step % 500 == 499 or step == recipe.steps - 1:
            report(step + 1, loss, denoiser, text, cache, data, seconds=time.time() - started)
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(average[name])
    return denoiser.eval()


def _ramp(step: int, steps: int) -> float:
    """Warm-up over 300 steps, constant to three fifths, then down to a fiftieth."""
    left = 1 - step / steps
    return min(1.0, (step + 1) / 300) * (1.0 if left > 0.4 else max(0.02, left / 0.4))


def report(
    step: int,
    loss: torch.Tensor,
    denoiser: Any,
    text: Text,
    cache: Cache,
    data: Data,
    *,
    seconds: float,
) -> None:
    """The loss on names seen and never seen, with the same draws every time."""
    shown = []
    for indices in (data.train[:NUM_HELD_OUT], data.held_out):
        draws = torch.Generator(indices.device).manual_seed(1)
        chosen = indices.repeat(4)
        with torch.no_grad():
            value = batch_loss(denoiser, text, cache, chosen, dropout=0.0, draws=draws)
        shown.append(f"{value.item():.4f}")
    speed = f"{step / seconds:.1f} steps/s" if seconds else ""
    print(
        f"step {step}: {seconds:.0f} s, {speed}, loss {loss.item():.4f}, fixed draws: "
        f"seen names {shown[0]}, held out {shown[1]}",
        flush=True,
    )


def draw(
    denoiser: Any, text: Text, autoencoder: Any, captions: list[str], *, constants: dict[str, float]
) -> list[Any]:
    """One picture a caption: 30 Euler steps, guidance 3, through the library's own sampler."""
    device = next(autoencoder.parameters()).device
    records = flux.encode_captions(text.encoders, captions, max_length=TEXT_TOKENS)
    empty = flux.encode_captions(text.encoders, [""] * len(captions), max_length=TEXT_TOKENS)
    noise = torch.randn(
        len(captions), 8, 16, 16, generator=torch.Generator(device).manual_seed(0), device=device
    )
    latents = euler(
        flux,
        denoiser,
        noise,
        conditioning=flux.conditioning(records).to(device),
        sigmas=flux.sampling_sigmas(30, latent_size=(16, 16), scheduler={}).tolist(),
        guidance=3.0,
        unconditional=flux.conditioning(empty).to(device),
    )
    pixels = flux.decode_latents(autoencoder, flux.denormalise(latents, constants))
    return [pictures.to_image(one.numpy()) for one in pixels]


def save(folder: Path, denoiser: Any, text: Text, autoencoder: Any) -> None:
    """An ordinary FLUX pipeline folder, bf16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    pipeline: Any = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
        vae=autoencoder,
        text_encoder=text.encoders.clip,
        tokenizer=text.encoders.clip_tokenizer,
        text_encoder_2=text.encoders.t5,
        tokenizer_2=text.encoders.t5_tokenizer,
        transformer=denoiser,
    )
    pipeline.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)


def show(path: Path, denoiser: Any, text: Text, autoencoder: Any, data: Data, cache: Cache) -> None:
    """A sheet of names seen in training, and of names and combinations never seen."""
    known = ["fox", "pizza", "rocket", "owl", "red apple", "cactus", "penguin", "balloon"]
    known += ["turtle", "hamburger", "octopus", "banana", "sunflower", "butterfly", "honeybee"]
    seen = [*known, *(data.names[int(i)] for i in data.train[:: len(data.train) // 21][:21])]
    unseen = [data.names[int(i)] for i in data.held_out[:8]]
    made_up = ["red fox", "purple cat face", "green heart", "blue apple", "yellow car", "pink owl"]
    names = [*seen, *unseen, *made_up]
    captions = [phrases(name)[n % 5] for n, name in enumerate(names)]
    captions[:4] = [f"{phrases(name)[1]} in flat style" for name in names[:4]]
    images = draw(denoiser, text, autoencoder, captions, constants=cache.constants)
    sheet = {
        title: [
            pictures.Captioned(image, name)
            for image, name in zip(images[a:b], names[a:b], strict=True)
        ]
        for title, a, b in (("seen", 0, len(seen)), ("never seen", len(seen), len(names)))
    }
    pictures.save(pictures.contact_sheet(sheet), path)


def main() -> None:
    """Train both phases and save the pipeline with a sheet of what it draws."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("folder", type=Path)
    for name in ("autoencoder_steps", "autoencoder_batch", "steps", "batch"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(Recipe, name))
    values = vars(parser.parse_args())
    source, folder = values.pop("pictures"), values.pop("folder")
    recipe = Recipe(**values)
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    data = load(source, seed=recipe.seed, device=pick_device())
    with without_cudnn_attention():
        autoencoder = train_autoencoder(
            data, steps=recipe.autoencoder_steps, batch=recipe.autoencoder_batch
        )
        print(f"PSNR on held-out pictures: {psnr(autoencoder, data.pixels[data.held_out]):.2f} dB")
        cache, text = build_cache(autoencoder, data), make_text(data, seed=recipe.seed)
        denoiser = train_denoiser(data, text, cache, recipe)
        save(folder / "base", denoiser, text, autoencoder)  # to bf16 from here on
        print(f"as bf16: {psnr(autoencoder, data.pixels[data.held_out]):.2f} dB")
        show(folder / "sheet.png", denoiser, text, autoencoder, data, cache)
    held_out = "\n".join(data.names[int(i)] for i in data.held_out)
    (folder / "held_out.txt").write_text(held_out + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
