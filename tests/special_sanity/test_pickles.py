"""No file that is written or read is a pickle: whatever can make or read one says here why it may."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "meshrl"
# Modules that pickle, also as part of a longer name (`ray.cloudpickle`).
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "hickle", "jsonpickle"}
# Functions and classes that do, by their whole names ...
WHOLE = {
    *("torch.load", "torch.save", "torch.jit.load", "torch.package", "torch.distributed.checkpoint.load"),
    *("torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save", "numpy.load", "numpy.save"),
    *("numpy.savez", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.UnsafeLoader"),
    *("multiprocessing.managers", "multiprocessing.reduction", "multiprocessing.connection.Listener"),
}
# ... and by their last ones, whatever they belong to.
LAST = {
    *("FileSystemReader", "FileSystemWriter", "dcp_to_torch_save", "torch_save_to_dcp", "ForkingPickler", "Unpickler"),
    *("Pickler", "PickleBuffer", "_dump_snapshot", "read_pickle", "to_pickle", "torch_load", "load_peft_weights"),
    *("reduce_tensor", "rebuild_cuda_tensor", "load_state_dict_from_url"),
}
PIPE = "between processes of ours: a pipe or socket pair whose other end is one that we have started"
RAY = "between processes of ours: Ray carries it"
SAFE = "a safe loader, which makes values alone"
MEMORY = "in memory, for whoever carries it between processes of ours"
ON_REQUEST = "meshrl convert --trust-pickle, of what the user trusts"
RESTRICTED = "meshrl convert; only types that hold values are let in (tests/trainer/test_checkpoint.py)"
# (file, function or class): why. Ray and torch.distributed carry objects between processes in the same way.
ALLOWED = {
    ("controller/worker_process.py", "send_message"): PIPE,
    ("controller/worker_process.py", "receive_message"): PIPE,
    ("controller/forkserver.py", "fork"): PIPE,
    ("controller/forkserver.py", "_next_request"): PIPE,
    ("data/tokenize.py", "_portable"): PIPE,
    ("rewards/process_pool.py", "_hear"): PIPE,
    ("rewards/pool_worker.py", "_answer"): PIPE,
    ("controller/ray.py", "__reduce_ex__"): RAY,
    ("controller/ray.py", "start_ray"): RAY,
    ("controller/ray.py", "build"): RAY,
    ("config/quick_yaml.py", "parsed"): SAFE,
    ("config/quick_yaml.py", "texts"): SAFE,
    ("data/serialization.py", "loads"): MEMORY,
    ("data/serialization.py", "reduce_dense"): MEMORY,
    ("data/serialization.py", "_TensorPickler"): MEMORY,
    ("rollout/sglang/client.py", "update"): "handles of shared memory for an engine of ours, which asks for a key",
    ("weights/transports.py", "_handle_of"): "numbers alone, written as JSON",
    ("weights/transports.py", "_opened"): "numbers alone, read from JSON",
    ("models/lora.py", "_load_adapters"): "refused before, unless there are safetensors, which it prefers",
    (
        "telemetry/device_stats.py",
        "stop",
    ): "for torch's own viewer, the only reader of its format; nothing here reads it",
    ("engines/old_state_files.py", "_IndexUnpickler"): RESTRICTED,
    ("engines/megatron/weights.py", "_chunk"): "meshrl convert, of Megatron's files, with weights_only",
    ("trainer/convert_pickles.py", "_convert_checkpoint"): "meshrl convert --trust-pickle, and with weights_only",
    ("trainer/convert_pickles.py", "_convert_model"): "meshrl convert --trust-pickle, and with weights_only",
    ("trainer/convert_pickles.py", "_with_plain_sampler"): ON_REQUEST,
    ("trainer/convert_pickles.py", "_Unpickler"): ON_REQUEST,
}
# What `from_pretrained` of these reads are texts and numbers; models and adapters must be told to read safetensors.
NO_WEIGHTS = {"AutoConfig", "AutoTokenizer", "GenerationConfig", "PeftConfig", "AutoImageProcessor"}
NO_WEIGHTS |= {"Qwen2VLImageProcessorPil"}
FROM_PICKLES = {("models/loading.py", "load_pickled_model"): ON_REQUEST}


def imported_names(tree):
    """What each name of a file stands for."""
    names = {"np": "numpy"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def whole_name(node, names):
    """`ray.cloudpickle.loads` of such an expression; None of any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = whole_name(node.value, names)
        return f"{owner or ''}.{node.attr}"
    return None


def owners(tree):
    """The innermost function or class around each node."""
    found = {}

    def walk(node, owner):
        found[id(node)] = owner
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for child in ast.iter_child_nodes(node):
            # Decorators and bases belong to what is around, all else to the function itself.
            walk(child, node.name if inner else owner)

    walk(tree, None)
    return found


def can_pickle(name):
    parts = name.split(".")
    is_error = parts[-1].endswith(("Error", "Exception"))
    wholes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return not is_error and bool((MODULES | LAST) & set(parts) or WHOLE & wholes)


def uses(text):
    """(line, name, function) of every use of what can pickle, and of every loading of a model's weights."""
    tree = ast.parse(text)
    names, around = imported_names(tree), owners(tree)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    annotations = set()
    for node in ast.walk(tree):
        for part in ("annotation", "returns"):
            if hinted := getattr(node, part, None):
                annotations |= {id(hint) for hint in ast.walk(hinted)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner | annotations:
            name = whole_name(node, names)
            if name and can_pickle(name):
                yield node.lineno, name, around[id(node)]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield node.value.lineno, "allow_pickle", around[id(node)]
        elif isinstance(node, ast.Call) and "from_pretrained" in (name := whole_name(node.func, names) or ""):
            safe = any(k.arg == "use_safetensors" and getattr(k.value, "value", None) is True for k in node.keywords)
            if not safe and name.split(".")[-2] not in NO_WEIGHTS:
                yield node.lineno, name, around[id(node)]


FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("name", FILES)
def test_nothing_pickles_unnoticed(name):
    for line, what, function in uses(FILES[name].read_text()):
        allowed = FROM_PICKLES if "from_pretrained" in what else ALLOWED
        assert (name, function) in allowed, f"meshrl/{name}:{line} uses {what} in {function}: write plain data instead"


def test_all_that_is_allowed_is_there():
    """Nothing is allowed for longer than it is needed."""
    found = {(name, function) for name, file in FILES.items() for _, _, function in uses(file.read_text())}
    assert found == ALLOWED.keys() | FROM_PICKLES.keys()


MISTAKES = [
    "import pickle\ndef f(file): return pickle.load(file)",
    "from pickle import loads as read\ndef f(data): return read(data)",
    "import pickle as p\nclass A:\n    def f(self): self.x = p.Unpickler",
    "import torch\ndef f(p): return torch.load(p, weights_only=True)",
    "from torch import save\ndef f(x, p): save(x, p)",
    "import numpy as np\ndef f(p): return np.load(p, allow_pickle=True)",
    "import numpy\ndef f(p): return numpy.lib.npyio.anything(p, allow_pickle=True)",
    "import torch.distributed.checkpoint as dcp\ndef f(p): dcp.load({}, checkpoint_id=p)",
    "from torch.distributed.checkpoint import FileSystemReader\ndef f(p): return FileSystemReader(p)",
    "def f(frame, p): frame.to_pickle(p)",
    "import pandas as pd\ndef f(p): return pd.read_pickle(p)",
    "import joblib\ndef f(p): return joblib.load(p)",
    "import ray\ndef f(x): return ray.cloudpickle.dumps(x)",
    "import yaml\ndef f(p): return yaml.load(p, yaml.UnsafeLoader)",
    "def f(auto, p): return auto.from_pretrained(p)",
    "def f(auto, p): return auto.from_pretrained(p, use_safetensors=False)",
    "from transformers import AutoModelForCausalLM\ndef f(p): return AutoModelForCausalLM.from_pretrained(p)",
]


@pytest.mark.parametrize("text", MISTAKES)
def test_what_pickles_is_seen(text):
    """The control."""
    assert [function for _, _, function in uses(text)].count("f") >= 1


def test_what_does_not_pickle_is_passed_over():
    text = "import json, torch, yaml\nfrom transformers import AutoConfig\ndef f(p, m: 'pickle.Pickler'):\n"
    text += "    json.load(p); yaml.safe_load(p); m.load_state_dict(p); AutoConfig.from_pretrained(p)\n"
    text += "    return m.from_pretrained(p, use_safetensors=True)"
    assert list(uses(text)) == []
