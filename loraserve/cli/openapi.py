"""`loraserve openapi`."""

import rich_click as click


@click.command()
def openapi() -> None:
    """Print the OpenAPI document that every server answers at /schema/openapi.json."""
    from loraserve.api.app import openapi_document

    click.echo(openapi_document(), nl=False)
