import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The part of JSON that is needed here: objects are maps, integers are Long, other numbers Double. */
final class Json {
    final String text;
    int at;

    Json(String text) {
        this.text = text;
    }

    static Map<String, Object> object(String text) {
        return map(new Json(text).value());
    }

    @SuppressWarnings("unchecked")
    static Map<String, Object> map(Object value) {
        return (Map<String, Object>) value;
    }

    Object value() {
        char first = peek();
        switch (first) {
            case '{': {
                Map<String, Object> map = new LinkedHashMap<>();
                for (at++; !taken('}'); taken(',')) {
                    String key = (String) value();
                    if (!taken(':')) throw new IllegalArgumentException("no colon at " + at + " of " + text);
                    map.put(key, value());
                }
                return map;
            }
            case '[': {
                List<Object> list = new ArrayList<>();
                for (at++; !taken(']'); taken(',')) list.add(value());
                return list;
            }
            case '"':
                return string();
            default: {
                int start = at;
                while (at < text.length() && ",]} \t".indexOf(text.charAt(at)) < 0) at++;
                String word = text.substring(start, at);
                switch (word) {
                    case "null": return null;
                    case "true": return true;
                    case "false": return false;
                    default: return word.matches("-?\\d+") ? (Object) Long.valueOf(word) : (Object) Double.valueOf(word); // NaN, Infinity too
                }
            }
        }
    }

    String string() {
        StringBuilder built = new StringBuilder();
        for (at++; text.charAt(at) != '"'; at++) {
            char each = text.charAt(at);
            if (each != '\\') {
                built.append(each);
                continue;
            }
            each = text.charAt(++at);
            if (each == 'u') {
                built.append((char) Integer.parseInt(text.substring(at + 1, at + 5), 16));
                at += 4;
            } else {
                int escape = "bfnrt".indexOf(each);
                built.append(escape < 0 ? each : "\b\f\n\r\t".charAt(escape));
            }
        }
        at++;
        return built.toString();
    }

    char peek() {
        while (text.charAt(at) == ' ') at++;
        return text.charAt(at);
    }

    boolean taken(char wanted) {
        if (peek() != wanted) return false;
        at++;
        return true;
    }

    static String text(Object value) {
        StringBuilder built = new StringBuilder();
        write(value, built);
        return built.toString();
    }

    static void write(Object value, StringBuilder built) {
        if (value instanceof Map<?, ?> map) {
            String comma = "{";
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                built.append(comma);
                quote(entry.getKey().toString(), built);
                built.append(':');
                write(entry.getValue(), built);
                comma = ",";
            }
            built.append(map.isEmpty() ? "{}" : "}");
        } else if (value instanceof List<?> list) {
            String comma = "[";
            for (Object each : list) {
                built.append(comma);
                write(each, built);
                comma = ",";
            }
            built.append(list.isEmpty() ? "[]" : "]");
        } else if (value instanceof CharSequence text) {
            quote(text, built);
        } else {
            built.append(value); // numbers (NaN and Infinity as Python's json reads them), booleans, null
        }
    }

    static void quote(CharSequence text, StringBuilder built) {
        built.append('"');
        for (int i = 0; i < text.length(); i++) {
            char each = text.charAt(i);
            if (each == '"' || each == '\\') built.append('\\').append(each);
            else if (each < ' ' || each > '~') built.append(String.format("\\u%04x", (int) each));
            else built.append(each);
        }
        built.append('"');
    }
}
