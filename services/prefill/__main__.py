"""`python -m services.prefill`: a worker that reads prompts, unless told another role."""

from halfmoon.worker.main import run
from services.prefill.settings import PrefillSettings

if __name__ == "__main__":
    run("prefill", PrefillSettings)
