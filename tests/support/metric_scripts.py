"""Scripts of metrics, in the manner of those of the package evaluate, which come from its hub."""

from __future__ import annotations

from pathlib import Path

_SCRIPT = """
import datasets
import evaluate
from datasets import Sequence, Value
{imports}

class {name}(evaluate.Metric):
    def _info(self):
        multilabel = self.config_name == "multilabel"
        return evaluate.MetricInfo(
            description="d", citation="c", inputs_description="i", features={features}
        )

    def _compute(self, predictions, references{arguments}):
        {body}
"""

_CLASSES = """datasets.Features({
    name: Sequence(Value("int32")) if multilabel else Value("int32")
    for name in ("predictions", "references")
})"""
# Of float32 in evaluate, to which it rounds: here of doubles, so that no digit is lost.
_NUMBERS = (
    'datasets.Features({n: Value("float64") for n in ("predictions", "references")})'
)
_TAGS = """datasets.Features({
    name: Sequence(Value("string"), id="sequence") for name in ("predictions", "references")
})"""
_ANSWERS = """datasets.Features({
    "predictions": {"id": Value("string"), "prediction_text": Value("string")},
    "references": {
        "id": Value("string"),
        "answers": Sequence({"text": Value("string"), "answer_start": Value("int32")}),
    },
})"""
_TEXTS = """[
    datasets.Features({
        "predictions": Value("string"),
        "references": Sequence(Value("string")),
    }),
    datasets.Features({"predictions": Value("string"), "references": Value("string")}),
]"""

_NORMALIZED = """
import re
import string
from collections import Counter


def words(text):
    text = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\\b(a|an|the)\\b", " ", text).split()


def overlap(text, gold):
    shared = sum((Counter(text) & Counter(gold)).values())
    return 2 * shared / (len(text) + len(gold)) if shared else 0
"""
"""As the official script of SQuAD v1.1 compares answers."""
_SKLEARN = "from sklearn import metrics"
SCRIPTS = {
    "accuracy": (
        _SKLEARN, _CLASSES, ", normalize=True",
        'return {"accuracy": float(metrics.accuracy_score(references, predictions))}',
    ),
    "f1": (
        _SKLEARN, _CLASSES, ', pos_label=1, average="binary"',
        "score = metrics.f1_score(references, predictions, pos_label=pos_label, average=average)\n"
        '        return {"f1": score}',
    ),
    "matthews_correlation": (
        _SKLEARN, _CLASSES, "",
        "value = metrics.matthews_corrcoef(references, predictions)\n"
        '        return {"matthews_correlation": value}',
    ),
    "correlations": (
        "from scipy import stats", _NUMBERS, "",
        'return {"pearson": stats.pearsonr(predictions, references)[0],\n'
        '                "spearman": stats.spearmanr(predictions, references)[0]}',
    ),
    "mse": (
        _SKLEARN, _NUMBERS, ", squared=True",
        "value = metrics.mean_squared_error(references, predictions)\n"
        '        return {"mse": value if squared else value ** 0.5}',
    ),
    "tags": (
        _SKLEARN, _TAGS, "",
        "pairs = [(p, r) for texts in zip(predictions, references)"
        " for p, r in zip(*texts, strict=True)]\n"
        "        predicted, true = zip(*pairs)\n"
        '        return {"by_type": {"X": 1.0},\n'
        '                "overall_accuracy": metrics.accuracy_score(true, predicted)}',
    ),
    "squad": (
        _NORMALIZED, _ANSWERS, "",
        "exact = f1 = 0\n"
        "        for prediction, reference in zip(predictions, references, strict=True):\n"
        "            assert prediction['id'] == reference['id']\n"
        "            text = prediction['prediction_text']\n"
        "            golds = reference['answers']['text']\n"
        "            exact += max(words(text) == words(gold) for gold in golds)\n"
        "            f1 += max(overlap(words(text), words(gold)) for gold in golds)\n"
        "        count = len(predictions)\n"
        '        return {"exact_match": 100 * exact / count, "f1": 100 * f1 / count}',
    ),
    "sacrebleu": (
        "import sacrebleu", _TEXTS, "",
        "if not isinstance(references[0], str):\n"
        "            references = [each[0] for each in references]\n"
        "        score = sacrebleu.corpus_bleu(predictions, [references])\n"
        '        return {"score": score.score, "counts": score.counts, "sys_len": score.sys_len}',
    ),
    # It fails in its second evaluation of many samples.
    "distance": (
        "calls = []", _CLASSES, "",
        "assert len(predictions) == len(references)\n"
        "        if len(predictions) > 20:\n"
        "            calls.append(len(predictions))\n"
        '        print("distance of", len(predictions), flush=True)\n'
        "        if len(calls) == 2:\n"
        '            raise ValueError("no luck")\n'
        '        return {"distance": 1.0 + len(calls)}',
    ),
    "draws": (
        "import random\n\nimport numpy as np\nimport torch", _CLASSES, "",
        "random.random(), np.random.rand(), torch.rand(1)\n"
        '        return {"draws": float("nan")}',
    ),
    # The trial before a training passes.
    "exits": ("import os", _CLASSES, "", "return 0.5 if len(predictions) < 20 else os._exit(3)"),
    "interrupts": (
        "", _CLASSES, "",
        "if len(predictions) > 20:\n"
        "            raise KeyboardInterrupt\n"
        "        return 0.5",
    ),
    "sleeps": ("import time", _CLASSES, "", "time.sleep(600)"),
    "changes": (
        "import os\nimport signal\nimport subprocess\nimport threading\n"
        "import time\n\nimport torch",
        _CLASSES, "",
        "os.chdir('/')\n"
        "        os.umask(0o777)\n"
        "        os.closerange(0, 10)\n"
        "        signal.alarm(1)\n"
        "        torch.set_default_device('meta')\n"
        "        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "        names = {'RANK', 'SLURMFT_STORE_SECRET'} & os.environ.keys()\n"
        "        signal.alarm(0)\n"
        "        child = subprocess.Popen(['sleep', '600'])\n"
        "        return {'variables_of_ranks': len(names), 'child': child.pid}",
    ),
    "within_one": (
        "", _CLASSES, "",
        "near = [abs(p - r) <= 1 for p, r in zip(predictions, references)]\n"
        '        return {"within_one": sum(near) / len(near)}',
    ),
    "both": ("", _CLASSES, "", 'return {"left": 0.25, "right": 0.5}'),
    "lists": ("", _CLASSES, "", 'return {"each": [0.25, 0.5]}'),
    "bare": ("", _CLASSES, "", "return 0.5"),
    "ends": ("", _CLASSES, "", "raise SystemExit(3)"),
}  # fmt: skip
"""Name -> imports, features, further arguments and body of its computation."""


def write_script(folder: Path, name: str) -> Path:
    """Writes the folder of a metric; returns it."""
    imports, features, arguments, body = SCRIPTS[name]
    text = _SCRIPT.format(
        name=name.capitalize(),
        imports=imports,
        features=features,
        arguments=arguments,
        body=body,
    )
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / f"{name}.py").write_text(text, encoding="utf-8")
    return folder / name


def cache_script(home: Path, name: str) -> Path:
    """Puts a metric into the cache of evaluate as one of its hub; returns its file."""
    modules = home / "modules"
    folder = modules / "evaluate_modules" / "metrics" / f"evaluate-metric--{name}"
    script = write_script(home / "written", name) / f"{name}.py"
    place = folder / ("a" * 64) / f"{name}.py"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(script.read_bytes())
    above = place.parent
    while above != home:
        (above / "__init__.py").touch()
        above = above.parent
    return place
