"""The examples of the gallery, in the order of its pages."""

from __future__ import annotations

from kit.gallery import Example, Plot, Series

NUMBER = r"\d+\.\d+"


def number(name: str) -> str:
    """Return the pattern of a number, as a group."""
    return rf"(?P<{name}>-?{NUMBER})"


def curves(log: str, **keys: str) -> tuple[Series, ...]:
    """Return curves of one log, by their labels."""
    return tuple(Series(label.replace("_", " "), log, key) for label, key in keys.items())


def both(log: str, metric: str) -> tuple[Series, ...]:
    """Return the curves of training and of validation."""
    return curves(log, training=f"train/{metric}", validation=f"valid/{metric}")


RESUME = "howto/resume.md"
EMA = "reference/addons/EMAAddon.md"
GALLERY = (
    Example(
        "digits",
        "Classification: handwritten digits",
        rf"test accuracy {number('accuracy')}; the curves are in runs/digits/curves\.png\n"
        r"to retrain from scratch, delete runs/digits\n",
        "test accuracy {accuracy}",
        "0.95",
        lambda found: found["accuracy"] >= 0.95,
        ("runs/digits/curves.png", "runs/digits/log.jsonl", "runs/digits/step-*"),
        (
            Plot("loss", both("runs/digits/log.jsonl", "loss"), "log"),
            Plot("accuracy", both("runs/digits/log.jsonl", "accuracy")),
        ),
        (RESUME, "howto/early_stopping.md", "explanation/reliability.md"),
        folder=".",
    ),
    Example(
        "regression",
        "Regression: the progress of diabetes",
        rf"network: R2 {number('r2')} over 442 patients\nridge regression: R2 {number('ridge')} over 442 patients\n",
        "R2 {r2}",
        "that of ridge regression, {ridge}, up to 0.01: little in these data is not linear",
        lambda found: found["r2"] >= found["ridge"] - 0.01,
        ("runs/fold-*.jsonl",),
        (
            Plot(
                "loss of training",
                tuple(Series(f"fold {n}", f"runs/fold-{n}-0.1.jsonl", "train/loss") for n in range(4)),
            ),
        ),
        (EMA, "howto/predictions.md"),
    ),
    Example(
        "char_lm",
        "Language model: characters of Python's help pages",
        r"\d+ characters, \d+ of them distinct\n"
        rf"test: {number('bits')} bits per character; bigrams: {number('bigram')}\n",
        "{bits} bits per character",
        "below the {bigram} of a bigram model",
        lambda found: found["bits"] < found["bigram"],
        ("runs/char_lm.jsonl",),
        (
            Plot("bits per character", both("runs/char_lm.jsonl", "bits"), line=("bigram", "bigrams")),
            Plot("learning rate", curves("runs/char_lm.jsonl", lr="lr")),
        ),
        (
            "howto/state_over_batches.md",
            "howto/accumulation.md",
            "howto/learning_rate.md",
        ),
    ),
    Example(
        "autoencoder",
        "Autoencoder: digits in six numbers",
        rf"principal components: mean squared error {number('components')} on the test digits\n"
        rf"autoencoder: mean squared error {number('error')} on the test digits\n"
        r"digits, what the autoencoder and what the components make of them: runs/autoencoder\.png\n",
        "mean squared error {error}",
        "below the {components} of six principal components",
        lambda found: found["error"] < found["components"],
        ("runs/autoencoder.jsonl", "runs/autoencoder.png"),
        (
            Plot(
                "mean squared error",
                both("runs/autoencoder.jsonl", "loss"),
                "log",
                ("components", "components"),
            ),
        ),
        ("features/report.md", "howto/predictions.md"),
        (("runs/autoencoder.png", "Sixteen test digits, what the autoencoder and what the components make of them"),),
    ),
    Example(
        "vae",
        "Variational autoencoder: digits drawn from noise",
        rf"test: {number('bound')} nats per digit; pixels one by one: {number('alone')}\n"
        r"digits drawn after 1, 2, 4, 8, 16, 32 and 60 epochs: runs/vae\.png\n",
        "{bound} nats per digit",
        "below the {alone} of pixels that are drawn one by one",
        lambda found: found["bound"] < found["alone"],
        ("runs/vae.jsonl", "runs/vae.png", "runs/vae/step-*"),
        (Plot("nats per digit", both("runs/vae.jsonl", "loss")),),
        ("howto/samples.md", RESUME),
        (("runs/vae.png", "Sixteen digits of the same noise, after 1, 2, 4, 8, 16, 32 and 60 epochs"),),
    ),
    Example(
        "gan",
        "GAN: draw the digit that is asked for",
        r"1040 steps of 2 optimizers\n"
        rf"a classifier trained on real digits reads {number('real')} of the held-out real ones\n"
        rf"a classifier trained on drawn digits reads {number('drawn')} of the held-out real ones\n"
        r"100 drawn digits are in runs/gan\.png\n",
        "{drawn} of real digits read by a classifier of drawn ones",
        "0.8; real digits teach it {real}",
        lambda found: found["drawn"] >= 0.8,
        ("runs/gan.jsonl", "runs/gan.png"),
        (
            Plot(
                "losses",
                curves("runs/gan.jsonl", critic="train/loss/critic", generator="train/loss/generator"),
            ),
        ),
        (
            "howto/several_optimizers.md",
            EMA,
        ),
        (("runs/gan.png", "A hundred digits that the generator drew, ten of each"),),
    ),
    Example(
        "multitask",
        "Multi-task learning: digit and ink",
        rf"digit: test accuracy {number('accuracy')}; logistic regression {number('logistic')}\n"
        rf"ink: test R2 {number('r2')}; ridge regression {number('ridge')}\n",
        "digit: accuracy {accuracy}; ink: R2 {r2}",
        "digit: 0.95 (logistic regression has {logistic}); ink: above that of ridge regression, {ridge}",
        lambda found: found["accuracy"] >= 0.95 and found["r2"] > found["ridge"],
        ("runs/multitask.jsonl",),
        (
            Plot("loss of the digit", both("runs/multitask.jsonl", "digit_loss"), "log"),
            Plot("loss of the ink", both("runs/multitask.jsonl", "ink_loss"), "log"),
        ),
        ("howto/several_losses.md",),
    ),
    Example(
        "contrastive",
        "Contrastive learning: features without labels",
        rf"a linear probe of pixels, with 100 labels: test accuracy {number('pixels')}\n"
        rf"a linear probe of features, with 100 labels: test accuracy {number('features')}\n",
        "test accuracy {features} of a linear probe",
        "above the {pixels} of a probe of the pixels, with the same labels",
        lambda found: found["features"] > found["pixels"],
        ("runs/contrastive.jsonl",),
        (
            Plot("loss", both("runs/contrastive.jsonl", "loss")),
            Plot("share of views that are found", both("runs/contrastive.jsonl", "found")),
        ),
        ("howto/predictions.md", "howto/learning_rate.md"),
    ),
    Example(
        "reinforce",
        "Reinforcement learning: balance a pole",
        r"\d+ games played: .+\n"
        rf"test: mean return {number('mean')} in 100 games; before training {number('untrained')}\n",
        "mean return {mean} of 100 games",
        "150; before training {untrained}",
        lambda found: found["mean"] >= 150,
        ("runs/reinforce.jsonl",),
        (Plot("return of a game", curves("runs/reinforce.jsonl", sampled="train/return", greedy="valid/return")),),
        ("howto/streams.md", "howto/early_stopping.md"),
    ),
    Example(
        "actor_critic",
        "Reinforcement learning: an actor-critic, and games that resume",
        r"ended after 133 steps and resumed: the same weights, bit for bit\n"
        rf"test: mean return {number('mean')} in 50 games\n",
        "mean return {mean} of 50 games; the same weights after a resume, bit for bit",
        "150, and the same weights",
        lambda found: found["mean"] >= 150,
        ("runs/played/*", "runs/resumed/*"),
        (Plot("games that end, of 256 moves", curves("runs/played/log.jsonl", games="train/ended")),),
        ("howto/reinforcement_learning.md", "explanation/what_is_saved.md"),
    ),
    Example(
        "gpt2",
        "A tiny GPT-2: pre-train, then fine-tune",
        r"samples of 64 tokens: \d+ of the help pages, \d+ of the descriptions\n"
        r"(?:\[.*\] \[WARNING\] .*\n)?"  # Of DeepSpeed, where it is installed.
        rf"pre-trained: test loss {number('pretrained')} on the descriptions\n"
        rf"fine-tuned: test loss {number('tuned')} on the descriptions\n"
        rf"scratch: test loss {number('scratch')} on the descriptions\n",
        "test loss {tuned}",
        "below that of the same model from scratch, {scratch}, and before the fine-tuning, {pretrained}",
        lambda found: found["tuned"] < min(found["scratch"], found["pretrained"]),
        tuple(f"runs/{name}/{file}" for name in ("pretrained", "fine-tuned", "scratch") for file in ("*",)),
        (
            Plot("loss of the pre-training", curves("runs/pretrained/log.jsonl", help_pages="train/loss")),
            Plot(
                "loss on the descriptions",
                (
                    Series("fine-tuned", "runs/fine-tuned/log.jsonl", "valid/loss"),
                    Series("from scratch", "runs/scratch/log.jsonl", "valid/loss"),
                ),
            ),
        ),
        ("moving/from_transformers.md", "howto/fine_tune.md"),
        extras="examples,hf",
    ),
    Example(
        "ddp",
        "DDP: two processes, one result",
        rf"world size 2\ntest accuracy {number('accuracy')}\n"
        rf"one process: accuracy {number('one')}, and no weight is further away than (?P<furthest>\de-\d\d)\n",
        "test accuracy {accuracy}; the weights of one process, up to {furthest}",
        "0.9, and 1e-5",
        lambda found: found["accuracy"] >= 0.9 and found["furthest"] <= 1e-5 and found["one"] == found["accuracy"],
        ("runs/one.jsonl", "runs/two.jsonl"),
        (
            Plot(
                "loss of the validation",
                (
                    Series("two processes", "runs/two.jsonl", "valid/loss"),
                    Series("one process", "runs/one.jsonl", "valid/loss"),
                ),
                "log",
            ),
        ),
        ("features/scale.md", "howto/several_processes.md"),
    ),
    Example(
        "sunspots",
        "Forecasting: sunspots, interrupted and resumed",
        r"runs/alone: exit code 0\nruns/killed: exit code -9\nruns/killed: exit code -9\nruns/killed: exit code 0\n"
        r"the last weights are the same, bit for bit\n"
        rf"network: root mean squared error {number('error')} sunspots\n"
        rf"the last year: root mean squared error {number('year')} sunspots\n"
        rf"the cycle before: root mean squared error {number('cycle')} sunspots\n"
        rf"autoregression: root mean squared error {number('autoregression')} sunspots\n",
        "the weights of the run that was left alone, bit for bit; root mean squared error {error}",
        "the same weights, and an error below the {year} of the last year's number. The cycle before, {cycle}, and an "
        "autoregression, {autoregression}, are better: such a network is no good choice for 176 windows",
        lambda found: found["error"] < found["year"],
        ("runs/alone/*", "runs/killed/*"),
        (
            Plot(
                "loss of the validation",
                (
                    Series("killed twice", "runs/killed/log.jsonl", "valid/loss"),
                    Series("left alone", "runs/alone/log.jsonl", "valid/loss"),
                ),
            ),
        ),
        (RESUME, "explanation/reliability.md"),
    ),
    Example(
        "imbalance",
        "Class imbalance: malignant tumours",
        rf"weight 1: balanced accuracy {number('unweighted')}, recall {NUMBER}\n"
        rf"weight 14: balanced accuracy {number('weighted')}, recall {NUMBER}\n"
        rf"logistic regression: balanced accuracy {number('logistic')}\n",
        "balanced accuracy {weighted}",
        "above that without weights, {unweighted}, and that of logistic regression, {logistic}",
        lambda found: found["weighted"] > max(found["unweighted"], found["logistic"]),
        ("runs/weight-1/*", "runs/weight-14/*"),
        (
            Plot(
                "balanced accuracy of the validation",
                (
                    Series("weight 1", "runs/weight-1/log.jsonl", "valid/balanced_accuracy"),
                    Series("weight 14", "runs/weight-14/log.jsonl", "valid/balanced_accuracy"),
                ),
            ),
            Plot(
                "recall of the validation",
                (
                    Series("weight 1", "runs/weight-1/log.jsonl", "valid/recall"),
                    Series("weight 14", "runs/weight-14/log.jsonl", "valid/recall"),
                ),
            ),
        ),
        (
            "howto/metrics.md",
            "reference/fits.md#torchmetrics",
            "howto/early_stopping.md",
        ),
    ),
    Example(
        "search",
        "Hyperparameter search: 200 digits to learn from",
        rf"(?:.*\n)+test accuracy with the best options: {number('best')}; logistic regression: {number('logistic')}\n",
        "test accuracy {best}",
        "above the {logistic} of logistic regression",
        lambda found: found["best"] > found["logistic"],
        ("runs/best/log.jsonl", "runs/search/*"),
        (
            Plot(
                "loss of the best options, trained once more",
                curves("runs/best/log.jsonl", training="train/loss"),
                "log",
            ),
            Plot("its accuracy", curves("runs/best/log.jsonl", training="train/accuracy")),
        ),
        ("features/search.md", EMA),
        extras="examples,search",
    ),
)
