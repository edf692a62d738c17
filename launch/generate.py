"""Continue a line of text with a saved model, by transformers alone."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue a line of text.")
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--tokens", type=int, default=40, help="how many to add at most")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    inputs = tokenizer(args.prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
