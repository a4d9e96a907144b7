"""`python -m services.decode`: a worker that writes answers, unless told another role."""

from halfmoon.worker.main import run
from services.decode.settings import DecodeSettings

if __name__ == "__main__":
    run("decode", DecodeSettings)
