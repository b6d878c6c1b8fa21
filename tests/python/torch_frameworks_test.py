"""Headroom inside Accelerate, Hugging Face's Trainer, and Lightning: skipped steps are reported, schedulers wait, and
training has the bits that it has with torch's scaler."""

import warnings

import pytest
import torch

import headroom.torch

accelerate = pytest.importorskip("accelerate")

OPTIMIZERS = {
    "plain": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "ours": lambda params: headroom.torch.AdamW(params, lr=1e-2),
}
STEPS = 100


def batches(bad_share=0.3, seed=1):
    """Inputs, some of which make gradients inf, and whether they do."""
    generator = torch.Generator("cpu").manual_seed(seed)
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=generator, device="cpu")
        bad = torch.rand((), generator=generator, device="cpu").item() < bad_share
        if bad:
            x[0, 0] = float("inf")
        yield x, bad


def model_of(device="cpu"):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(device)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


def accelerator_of(plugged, **options):
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = accelerate.Accelerator(mixed_precision="fp16", cpu=True)
    if plugged:
        import headroom.accelerate

        headroom.accelerate.plug(accelerator, **options)
    else:
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
    return accelerator


def train_with_accelerate(accelerator, optimizer_of, clip, bad_share=0.3, decay=0.99):
    model = model_of()
    optimizer = optimizer_of(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, decay)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    reported = 0
    for x, bad in batches(bad_share):
        optimizer.zero_grad()
        accelerator.backward(model(x).float().square().mean())
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        reported += optimizer.step_was_skipped == bad
    return model, scheduler.get_last_lr()[0], reported


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_accelerate_reports_every_skipped_step(kind, clip):
    accelerator = accelerator_of(True)
    _, rate, reported = train_with_accelerate(accelerator, OPTIMIZERS[kind], clip)
    assert reported == STEPS
    skipped = sum(bad for _, bad in batches())
    assert skipped > 20 and rate == pytest.approx(1e-2 * 0.99 ** (STEPS - skipped))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_accelerate_trains_with_the_bits_of_torchs_scaler(kind, clip):
    # A constant learning rate: with fused optimizers and torch's scaler, the schedule advances in skipped steps.
    ours, _, _ = train_with_accelerate(accelerator_of(True), OPTIMIZERS[kind], clip, decay=1.0)
    torchs, _, _ = train_with_accelerate(accelerator_of(False), OPTIMIZERS[kind], clip, decay=1.0)
    assert equal(ours, torchs)


def test_accelerate_clips_in_the_step():
    clipped, _, _ = train_with_accelerate(accelerator_of(True), OPTIMIZERS["ours"], True)
    in_step, _, reported = train_with_accelerate(accelerator_of(True, max_norm=1.0), OPTIMIZERS["ours"], False)
    assert reported == STEPS
    for a, b in zip(clipped.parameters(), in_step.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_accelerate_tells_optimizers_apart():
    accelerator = accelerator_of(True)
    models = [model_of(), model_of()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    models, optimizers = prepared[:2], prepared[2:]
    x = torch.ones(4, 8, device="cpu")
    for model, value in zip(models, (1.0, float("inf"))):
        accelerator.backward(model(x * value).float().mean() / 16)
    accelerator.scaler.step(optimizers[0].optimizer)
    accelerator.scaler.step(optimizers[1].optimizer)
    accelerator.scaler.update()
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [False, True]


def test_accelerate_steps_once_for_accumulated_batches():
    def train(plugged):
        accelerator = accelerator_of(plugged)
        accelerator.gradient_accumulation_steps = 4
        model = model_of()
        model, optimizer = accelerator.prepare(model, OPTIMIZERS["plain"](model.parameters()))
        for x, _ in batches(bad_share=0.05):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).float().square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return model

    ours = train(True)
    assert equal(ours, train(False)) and not equal(ours, model_of())


def test_accelerate_names_parameters_and_takes_any_policy():
    accelerator = accelerator_of(True, policy="headroom")
    model = model_of()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((2, 8), float("inf"), device="cpu")).float().mean())
    optimizer.step()
    assert accelerator.scaler.report().culprit.startswith("0.weight: ")
    assert accelerator.scaler.policy.rule == "headroom"


def test_accelerate_saves_and_loads_the_scaler(tmp_path):
    accelerator = accelerator_of(True, policy="headroom")
    train_with_accelerate(accelerator, OPTIMIZERS["ours"], False, bad_share=0.02)
    accelerator.save_state(str(tmp_path))
    state = accelerator.scaler.state_dict()
    again = accelerator_of(True, policy="headroom")
    model = model_of()
    optimizer = OPTIMIZERS["ours"](model.parameters())
    again.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    again.load_state(str(tmp_path))
    assert again.scaler.state_dict() == state


def test_the_norm_of_fp16_gradients_can_be_logged():
    """As Trainer does with max_grad_norm=0, by clip_grad_norm_(inf)."""
    accelerator = accelerator_of(True, max_norm=1e3, init_scale=2.0**14)
    scaler, model = accelerator.scaler, model_of().half()
    model, optimizer = accelerator.prepare(model, headroom.torch.AdamW(model.parameters(), lr=0.1))
    x = torch.ones(4, next(model.parameters()).shape[1], dtype=torch.float16, device=accelerator.device)
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(x).float().mean() / 64)
        norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        assert scaler.last_step_applied and float(norm) == pytest.approx(scaler.report().grad_norm, rel=1e-6)


def test_plug_comes_before_prepare():
    import headroom.accelerate

    accelerator = accelerator_of(False)
    model = model_of()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(headroom.Error, match="before accelerator.prepare"):
        headroom.accelerate.plug(accelerator)


class Regression(torch.nn.Module):
    """The interface of a transformers model."""

    def __init__(self):
        super().__init__()
        self.net = model_of()

    def forward(self, x, labels=None):
        return {"loss": (self.net(x).float() - labels).square().mean()}


def train_with_trainer(tmp_path, kind, plugged, decay=0.99, **arguments):
    transformers = pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    data = [{"x": x[0], "labels": x[0, :1].nan_to_num(posinf=0.0)} for x, _ in batches()]
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=1, num_train_epochs=1,
        report_to=[], logging_strategy="no", disable_tqdm=True, save_strategy="no", seed=1, **arguments)
    model = Regression()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, decay)
    applied = []

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Watch(transformers.TrainerCallback):
        def on_optimizer_step(self, *args, **kwargs):
            applied.append(not trainer.accelerator.optimizer_step_was_skipped)

    trainer = Trainer(model=model, args=settings, train_dataset=data, optimizers=(optimizer, scheduler),
                      callbacks=[Watch()])
    if plugged:
        import headroom.accelerate

        headroom.accelerate.plug(trainer)
    else:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train()
    return model, scheduler.get_last_lr()[0], applied


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hugging_face_trainer_reports_every_skipped_step(tmp_path, kind):
    _, rate, applied = train_with_trainer(tmp_path, kind, True)
    good = [not bad for _, bad in batches()]
    assert applied == good
    assert rate == pytest.approx(1e-2 * 0.99 ** sum(good))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hugging_face_trainer_has_the_bits_of_torchs_scaler(tmp_path, kind):
    # Without clipping: on the CPU the Trainer would clip gradients that torch's scaler has not unscaled.
    ours, _, _ = train_with_trainer(tmp_path, kind, True, decay=1.0, max_grad_norm=0.0)
    torchs, _, _ = train_with_trainer(tmp_path, kind, False, decay=1.0, max_grad_norm=0.0)
    assert equal(ours, torchs) and not equal(ours, Regression())


def test_hugging_face_trainer_resumes_with_the_scaler(tmp_path):
    transformers = pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState, GradientState

    import headroom.accelerate

    def run(resume):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=1, max_steps=20, report_to=[], seed=1,
            logging_strategy="no", disable_tqdm=True, save_strategy="steps", save_steps=10)
        model = Regression()
        data = [{"x": x[0], "labels": x[0, :1].nan_to_num(posinf=0.0)} for x, _ in batches()]
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=data,
                                       optimizers=(OPTIMIZERS["ours"](model.parameters()), None))
        scaler = headroom.accelerate.plug(trainer, policy="torch:growth_interval=3")
        trainer.train(resume_from_checkpoint=resume)
        return model, scaler

    whole, scaler = run(None)
    resumed, again = run(str(tmp_path / "checkpoint-10"))
    assert equal(whole, resumed) and scaler.state_dict() == again.state_dict()
    assert (scaler.report().steps, again.report().steps) == (20, 10) and scaler.report().skipped > 0


def train_with_lightning(plugin, kind, clip=None, **settings):
    lightning = pytest.importorskip("lightning")
    applied, rates = [], []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model_of()

        def training_step(self, batch, index):
            return self.net(batch[0]).float().square().mean()

        def configure_optimizers(self):
            optimizer = OPTIMIZERS[kind](self.net.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
            if settings.get("without_schedule"):
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def lr_scheduler_step(self, scheduler, metric):
            if self.trainer.precision_plugin.last_step_applied:
                super().lr_scheduler_step(scheduler, metric)

        def on_train_batch_end(self, *args):
            if hasattr(self.trainer.precision_plugin, "last_step_applied"):
                applied.append(self.trainer.precision_plugin.last_step_applied)
            rates.append(self.optimizers().param_groups[0]["lr"])

    module = Module()
    data = torch.utils.data.DataLoader([x for x, _ in batches()], batch_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", plugins=[plugin], max_epochs=1, gradient_clip_val=clip, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(module, data)
    return module, applied, rates


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_lightning_reports_every_skipped_step(kind, clip):
    pytest.importorskip("lightning")
    import headroom.lightning

    _, applied, rates = train_with_lightning(headroom.lightning.MixedPrecision("cpu"), kind, clip)
    good = [not bad for _, bad in batches()]
    assert applied == good
    assert rates[-1] == pytest.approx(1e-2 * 0.99 ** sum(good))


@pytest.mark.parametrize("kind, clip", [("plain", None), ("plain", 1.0), ("fused", None), ("ours", None)])
def test_lightning_trains_with_the_bits_of_torchs_scaler(kind, clip):
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    import headroom.lightning

    ours, _, _ = train_with_lightning(headroom.lightning.MixedPrecision("cpu"), kind, clip, without_schedule=True)
    torchs, _, _ = train_with_lightning(MixedPrecision("16-mixed", "cpu"), kind, clip, without_schedule=True)
    assert equal(ours, torchs)


def test_fabric_clips_with_fused_optimizers():
    lightning = pytest.importorskip("lightning")
    import headroom.lightning

    plugin = headroom.lightning.FabricMixedPrecision("cpu")
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    model = model_of()
    model, optimizer = fabric.setup(model, OPTIMIZERS["fused"](model.parameters()))
    applied = []
    for x, _ in batches():
        optimizer.zero_grad()
        fabric.backward(model(x).float().square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        applied.append(plugin.last_step_applied)
    assert applied == [not bad for _, bad in batches()]
