"""A running `oled-moe serve` asked with the stock OpenAI client: at once, streamed, step by step.

    oled-moe serve demo &
    pip install openai
    python examples/openai_client.py "What is 12 + 30?"

The text is the same each way. `diffusing` is a field of this server; the client hands it on.
"""

import argparse

from openai import OpenAI

# Takes several steps.
QUESTION = "Define task(text), which returns text repeated 4 times."


def ask(client: OpenAI, model: str, question: str) -> str:
    """The whole answer at once."""
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}]
    )
    return reply.choices[0].message.content or ""


def ask_streaming(client: OpenAI, model: str, question: str) -> str:
    """The answer in pieces, each sent as soon as no later step can change it."""
    text = ""
    for chunk in client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], stream=True
    ):
        piece = chunk.choices[0].delta.content or ""
        text += piece
        print(piece, end="", flush=True)
    print()
    return text


def watch(client: OpenAI, model: str, question: str) -> str:
    """The answer in pieces, and between them the block at work: ▒ is a position without a token."""
    text = ""
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        extra_body={"diffusing": True},
    ):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        frame = getattr(delta, "diffusion", None)
        if frame:
            print(f"block {frame['block']}, step {frame['step']:>2}  {frame['text']!r}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="where the server asks for one")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id
    answer = ask(client, model, args.question)
    print(f"{model}: {answer}\n\nstreamed:")
    streamed = ask_streaming(client, model, args.question)
    print("\nblock by block:")
    watched = watch(client, model, args.question)
    print(f"\nthe same text each way: {answer == streamed == watched}")


if __name__ == "__main__":
    main()
