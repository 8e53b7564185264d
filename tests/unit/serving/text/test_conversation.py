from loraserve.serving.text.conversation import ChatMessage, Conversation


def test_templates_find_what_was_thought_by_either_name() -> None:
    message = ChatMessage("assistant", "4", reasoning="Two and two.").for_template("developer")
    assert message["reasoning_content"] == message["reasoning"] == "Two and two."
    assert not {"reasoning_content", "reasoning"} & ChatMessage("assistant", "4").for_template("developer").keys()


def test_what_was_thought_counts_for_the_size_of_a_conversation() -> None:
    assert Conversation([ChatMessage("user", "x"), ChatMessage("assistant", "4", reasoning="Hm.")]).num_chars == 5
