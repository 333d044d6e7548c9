// Light or dark: what the system says, until the switch says otherwise.
import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";
import type { Theme } from "./colours";

const KEY = "headwater-theme";
export type Choice = Theme | "system";

function stored(): Choice {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system"; // a file that is opened directly may have no storage
  }
}

export const ThemeContext = createContext<Theme>("light");

export function useTheme(): Theme {
  return useContext(ThemeContext);
}

export function useThemeChoice(): { theme: Theme; choice: Choice; next: () => void } {
  const [choice, setChoice] = useState<Choice>(stored);
  const [isDark, setDark] = useState(() => matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const update = () => setDark(query.matches);
    query.addEventListener("change", update);
    return () => query.removeEventListener("change", update);
  }, []);
  const theme: Theme = choice === "system" ? (isDark ? "dark" : "light") : choice;
  document.documentElement.dataset["theme"] = theme;
  const next = () => {
    const order: Choice[] = ["system", "light", "dark"];
    const chosen = order[(order.indexOf(choice) + 1) % order.length] ?? "system";
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // The choice then lasts until the page is closed.
    }
    setChoice(chosen);
  };
  return { theme, choice, next };
}
