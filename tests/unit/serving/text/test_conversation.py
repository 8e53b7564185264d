from loraserve.serving.text.conversation import ChatMessage, Conversation


def test_templates_find_reasoning_under_both_names() -> None:
    message = ChatMessage("assistant", "4", reasoning="Two and two.").for_template("developer")
    assert message["reasoning_content"] == message["reasoning"] == "Two and two."
    assert not {"reasoning_content", "reasoning"} & ChatMessage("assistant", "4").for_template("developer").keys()


def test_reasoning_counts_toward_the_size_of_a_conversation() -> None:
    assert Conversation([ChatMessage("user", "x"), ChatMessage("assistant", "4", reasoning="Hm.")]).num_chars == 5
