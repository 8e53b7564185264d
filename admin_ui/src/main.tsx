import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/shell.css";
import "./state/theme";

import { render } from "preact";

import { PAGES } from "./pages";
import { keepFocus } from "./parts/kept-focus";
import { Shell } from "./shell/shell";

keepFocus();
const root = document.getElementById("app");
if (root) render(<Shell pages={PAGES} />, root);
