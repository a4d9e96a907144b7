"""`python -m services.prefill`: a worker that reads prompts, unless told another role."""

from halfmoon.rpc.service import service_main
from halfmoon.worker.main import serve
from services.prefill.settings import PrefillSettings

if __name__ == "__main__":
    service_main("prefill", PrefillSettings, serve)
