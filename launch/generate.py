"""Write one line with a saved model, by transformers alone."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue a text by one line.")
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--tokens", type=int, default=24, help="how many to add at most")
    args = parser.parse_args()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=args.tokens, do_sample=False, repetition_penalty=1.3
    )
    added = output[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(added, skip_special_tokens=True).strip()
    print(text.partition("\n")[0])


if __name__ == "__main__":
    main()
