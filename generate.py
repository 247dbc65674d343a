"""Generate text: ``python generate.py checkpoint=RUN/last.ckpt prompt="Once upon a time"``."""

from selmodel.cli import main
from selmodel.inference.run import generate_text

if __name__ == "__main__":
    main(generate_text, "generate", literal=("prompt",))
