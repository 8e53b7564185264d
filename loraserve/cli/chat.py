"""`loraserve chat`: talk to a running server from the terminal."""

import sys

import rich_click as click

from loraserve.cli.number_range import NumberRange


@click.command(context_settings={"show_default": True})
@click.option("--url", default="http://127.0.0.1:8000", envvar="LORASERVE_URL", help="Server, without /v1.")
@click.option("--api-key", envvar=["LORASERVE_API_KEY", "OPENAI_API_KEY"], help="Sent as a bearer token.")
@click.option("--model", help="Adapter or base model to start with. [the base model]")
@click.option("--system", help="System prompt.")
@click.option("--temperature", type=NumberRange(0), help="[the model's default]")
@click.option("--max-tokens", type=click.IntRange(1), help="[as many as fit in the context]")
@click.option("--single-turn", is_flag=True, help="Send every message alone, without the conversation before it.")
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    single_turn: bool,
) -> None:
    """Chat with a running server. Type /help for commands.

    Without a terminal, every line of standard input is a message and only the answers are printed. Reasoning (see
    --reasoning-parser of the server) is shown only on a terminal.
    """
    from loraserve.cli.chat_session import ChatError, ChatOptions, ChatSession, connect, run_chat

    options = ChatOptions(temperature, max_tokens, single_turn)
    try:
        with connect(url, api_key) as client:
            sys.exit(run_chat(ChatSession(client, model, system, options)))
    except ChatError as error:
        raise click.ClickException(str(error)) from error
